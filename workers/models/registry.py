"""Model families by the architecture name in config.json."""

from __future__ import annotations

import torch

from workers.checkpoint.folder import Checkpoint
from workers.models import llama
from workers.models.base import LoadProgress, Model, ModelFamily

FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(llama.expected_tensors, llama.load),
}


def open_checkpoint(folder: str) -> Checkpoint:
    """Open and check a model folder in full, before any weight is read.

    Raises ModelError naming file, key and reason.
    """
    checkpoint = Checkpoint(folder, FAMILIES)
    family = FAMILIES[checkpoint.config.architecture]
    checkpoint.check_tensors(family.expected_tensors(checkpoint.config, checkpoint.tensor_names))
    return checkpoint


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: LoadProgress
) -> Model:
    """Load a checkpoint that `open_checkpoint` has accepted. Raises ModelError, MemoryError."""
    family = FAMILIES[checkpoint.config.architecture]
    with torch.inference_mode():
        return family.load(checkpoint, dtype, device, progress)
