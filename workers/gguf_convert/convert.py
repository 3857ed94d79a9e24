"""Conversion of a GGUF file of any architecture that is known here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import gguf
import torch
from safetensors.torch import save_file

from cluster.core.errors import ModelError
from workers.gguf_convert import gemma3, llama
from workers.gguf_convert.metadata import GgufMetadata, Progress, special_ids, write_json


class _Weights(Protocol):
    def __call__(
        self, reader: gguf.GGUFReader, metadata: GgufMetadata, progress: Progress
    ) -> Iterator[tuple[str, torch.Tensor]]: ...


class _Describe(Protocol):
    def __call__(self, metadata: GgufMetadata, tensor_names: set[str]) -> dict[str, object]: ...


class _WriteTokenizer(Protocol):
    def __call__(self, metadata: GgufMetadata, target: Path) -> None: ...


class Architecture(NamedTuple):
    """config: of config.json. write_tokenizer: into a folder. weights: (name, bf16 tensor)."""

    config: _Describe
    write_tokenizer: _WriteTokenizer
    weights: _Weights


ARCHITECTURES = {
    "llama": Architecture(llama.config, llama.write_tokenizer, llama.weights),
    "gemma3": Architecture(gemma3.config, gemma3.write_tokenizer, gemma3.weights),
}


def convert(source: Path, target: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, model.safetensors (bf16), tokenizer.json,
    tokenizer_config.json and special_tokens_map.json into the existing folder `target`.

    Raises ModelError for a file of another architecture or tokenizer, OSError when the disk is
    full.
    """
    reader = gguf.GGUFReader(source)
    metadata = GgufMetadata(reader, source)
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{source}: general.architecture must be one of {sorted(ARCHITECTURES)}, got {name!r}"
        )
    architecture = ARCHITECTURES[name]
    tensor_names = {tensor.name for tensor in reader.tensors}
    config = architecture.config(metadata, tensor_names)
    architecture.write_tokenizer(metadata, target)
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", dict(special_ids(metadata)))
    tensors = dict(architecture.weights(reader, metadata, progress))
    weights_file = target / "model.safetensors"
    save_file(tensors, weights_file, metadata={"format": "pt"})
    # safetensors writes for the owner alone; a model baked into an image is read by others.
    weights_file.chmod(0o644)
