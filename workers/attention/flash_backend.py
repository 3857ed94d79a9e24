"""FlashAttention, whichever package of it is there."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionBackend, AttentionSpec, Capabilities, LayerCache
from workers.attention.flash_writer import make_writer
from workers.attention.meta import StepMeta
from workers.attention.providers import (
    FlashAttn,
    FlashProvider,
    FlashStep,
    InsideVllm,
    VllmFlashAttn,
)
from workers.attention.varlen import TorchVarlen
from workers.layers.rotary import RotaryAngles

logger = logging.getLogger(__name__)

PROVIDERS: tuple[type[FlashProvider], ...] = (VllmFlashAttn, InsideVllm, FlashAttn, TorchVarlen)
"""Best first: small pages before large ones, a call of its own for single tokens before none."""

_EXPECTED_SEQS = 1024


class FlashAttention(AttentionBackend):
    """An adapter: the step in the words of the package that was found.

    A captured `run` fits later steps if they, too, are steps of single tokens.
    """

    name: ClassVar[str] = "flash"
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes={"cuda": frozenset({torch.float16, torch.bfloat16})},
        head_dims=frozenset(range(8, 257, 8)),
        windows=True,
        softcap=True,
        graph_safe=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        provider = choose_provider(spec)
        if isinstance(provider, str):
            raise ConfigError(f"attention backend {self.name!r}: {provider}")
        self.provider = provider(spec)
        self._writer = make_writer(spec)
        # Kept from step to step: a captured launch reads it where it was.
        self._cu_seqlens_k = torch.zeros(_EXPECTED_SEQS + 1, dtype=torch.int32, device=spec.device)
        self._step: FlashStep | None = None
        logger.info("FlashAttention from %s %s", provider.module, provider.version())

    @classmethod
    def objection(cls, spec: AttentionSpec) -> str | None:
        general = super().objection(spec)
        if general is not None:
            return general
        provider = choose_provider(spec)
        return provider if isinstance(provider, str) else None

    def plan(self, meta: StepMeta) -> None:
        offsets = None
        if meta.max_q > 1:
            seqs = meta.num_seqs
            if seqs >= len(self._cu_seqlens_k):
                self._cu_seqlens_k = self._cu_seqlens_k.new_zeros(2 * seqs + 1)
            offsets = self._cu_seqlens_k[: seqs + 1]
            torch.cumsum(meta.seqused_k, 0, dtype=torch.int32, out=offsets[1:])
        self._step = FlashStep(meta, offsets)

    def angle_dtype(self) -> torch.dtype:
        return self._writer.angle_dtype

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> None:
        self._writer.write(key, value, cache, self._planned().meta.slot_mapping)

    def rotate_and_write(
        self, heads: torch.Tensor, angles: RotaryAngles, cache: LayerCache
    ) -> torch.Tensor:
        slots = self._planned().meta.slot_mapping
        return self._writer.rotate_and_write(heads, angles, cache, slots)

    def run(
        self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, window: int = 0
    ) -> None:
        self.provider.attend(self._planned(), query, cache, out, window)

    def _planned(self) -> FlashStep:
        if self._step is None:
            raise RuntimeError("no step was planned")
        return self._step


def choose_provider(spec: AttentionSpec) -> type[FlashProvider] | str:
    """The first package that fits, or why none does."""
    objections = []
    for provider in PROVIDERS:
        objection = provider.objection(spec)
        if objection is None:
            return provider
        objections.append(f"{provider.module}: {objection}")
    return f"no FlashAttention package fits ({'; '.join(objections)})"
