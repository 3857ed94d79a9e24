"""Model families by the architecture name in config.json."""

from __future__ import annotations

import torch

from workers.checkpoint.folder import Checkpoint
from workers.checkpoint.modelconfig import ConfigReader
from workers.models import decoder, families
from workers.models.base import LoadProgress, Model, ModelFamily
from workers.models.tensors import expected_tensors, local_elements
from workers.parallel.collectives import Alone, Collectives, Shard


def _decoder_family(read_config: ConfigReader) -> ModelFamily:
    return ModelFamily(read_config, expected_tensors, local_elements, decoder.load)


FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": _decoder_family(families.llama),
    "MistralForCausalLM": _decoder_family(families.mistral),
    "Qwen2ForCausalLM": _decoder_family(families.qwen2),
    "Qwen3ForCausalLM": _decoder_family(families.qwen3),
    "Gemma2ForCausalLM": _decoder_family(families.gemma2),
    "Gemma3ForCausalLM": _decoder_family(families.gemma3),
}
_ALONE = Alone()


def open_checkpoint(folder: str) -> Checkpoint:
    """Open and check a model folder in full, before any weight is read.

    Raises ModelError naming file, key and reason.
    """
    checkpoint = Checkpoint(folder, {name: f.read_config for name, f in FAMILIES.items()})
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
