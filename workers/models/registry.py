"""Model families by the architecture name in config.json."""

from __future__ import annotations

import torch

from workers.checkpoint.folder import Checkpoint
from workers.models import decoder
from workers.models.base import LoadProgress, Model, ModelFamily
from workers.models.tensors import expected_tensors, local_elements
from workers.parallel.collectives import Alone, Collectives, Shard

FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(expected_tensors, local_elements, decoder.load),
}
_ALONE = Alone()


def open_checkpoint(folder: str) -> Checkpoint:
    """Open and check a model folder in full, before any weight is read.

    Raises ModelError naming file, key and reason.
    """
    checkpoint = Checkpoint(folder, FAMILIES)
    family = FAMILIES[checkpoint.config.architecture]
    checkpoint.check_tensors(family.expected_tensors(checkpoint.config, checkpoint.tensor_names))
    return checkpoint


def local_parameters(checkpoint: Checkpoint, shard: Shard) -> int:
    """Elements of all tensors that a rank holds."""
    family = FAMILIES[checkpoint.config.architecture]
    return family.local_elements(checkpoint.config, checkpoint.tensor_names, shard)


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress,
    collectives: Collectives = _ALONE,
) -> Model:
    """Load a rank's part of a checkpoint that `open_checkpoint` has accepted; of the others' parts
    nothing is read. Raises ModelError, MemoryError."""
    family = FAMILIES[checkpoint.config.architecture]
    with torch.inference_mode():
        return family.load(checkpoint, dtype, device, progress, collectives)
