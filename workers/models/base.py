"""What the runner needs from a model, whatever its family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from workers.attention.backend import AttentionBackend, LayerCache
from workers.checkpoint.folder import Checkpoint
from workers.checkpoint.modelconfig import ConfigReader, ModelConfig
from workers.parallel.collectives import Collectives, Shard

LoadProgress = Callable[[float], None]
"""Called with the share of the weights that is loaded, 0 to 1."""


class Batch(NamedTuple):
    """A flattened mixed batch of T tokens: prefill chunks, replays and decodes side by side.

    token_ids, positions: [T]. logits_index: [R], the tokens whose logits are wanted. All int32.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor


class Model(Protocol):
    """A loaded model. weight_bytes: as held in memory, packed copies included."""

    weight_bytes: int

    def forward(
        self, batch: Batch, attention: AttentionBackend, caches: Sequence[LayerCache]
    ) -> torch.Tensor | None:
        """Logits [R, vocab] in the model's dtype, for the tokens of `batch.logits_index`, on the
        first rank of a tensor-parallel group; None on the others.

        `attention` has planned this step; every layer writes its K and V into its cache.
        """


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How one architecture is recognised and loaded.

    read_config: from config.json, by the architecture's name.
    expected_tensors: from the config and the names found, (name, shape) of every tensor that the
    checkpoint must hold; a tensor that it may hold is named only where it was found.
    local_elements: elements of all tensors that a rank holds.
    load: builds a rank's part of the model in the given dtype on the given device.
    """

    read_config: ConfigReader
    expected_tensors: Callable[[ModelConfig, Set[str]], Iterator[tuple[str, tuple[int, ...]]]]
    local_elements: Callable[[ModelConfig, Set[str], Shard], int]
    load: Callable[[Checkpoint, torch.dtype, torch.device, LoadProgress, Collectives], Model]
