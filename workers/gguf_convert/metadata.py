"""What a GGUF file says about itself, and helpers that all architectures share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cluster.core.errors import ModelError

CONTROL_TOKEN = 3
"""tokenizer.ggml.token_type of tokens that stand for themselves and are never merged."""
USER_DEFINED_TOKEN = 4
"""The same, but ordinary text."""

Progress = Callable[[float], None]


class GgufMetadata:
    """Key-value pairs of a GGUF file, refused by name when absent."""

    def __init__(self, reader: gguf.GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def get(self, key: str) -> Any:
        """Raises ModelError when the file does not have the key."""
        field = self._reader.fields.get(key)
        if field is None:
            raise ModelError(f"{self._path}: key {key!r} is missing")
        return field.contents()

    def expect(self, key: str, value: Any) -> None:
        """Raises ModelError unless the key has this value."""
        found = self.get(key)
        if found != value:
            raise ModelError(f"{self._path}: {key} must be {value!r}, got {found!r}")

    def has(self, key: str) -> bool:
        return key in self._reader.fields


def special_ids(metadata: GgufMetadata) -> dict[str, int]:
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def special_tokens(metadata: GgufMetadata, tokens: list[str]) -> dict[str, str]:
    ids = special_ids(metadata)
    return {
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[metadata.get("tokenizer.ggml.unknown_token_id")],
    }


def shortest(value: float) -> float:
    """Stored as fp32; the shortest decimal that is the same fp32 is what was meant."""
    return float(str(np.float32(value)))


def hugging_face_name(
    name: str, outside: Mapping[str, str], in_layer: Mapping[str, str], architecture: str
) -> str:
    """outside, in_layer: GGUF names of tensors -> Hugging Face's, without the layer's prefix.

    Raises ModelError for a tensor that is in neither."""
    if name in outside:
        return outside[name]
    prefix, _, rest = name.partition(".")
    number, _, kind = rest.partition(".")
    if prefix != "blk" or kind not in in_layer:
        raise ModelError(f"GGUF tensor {name!r} is not part of the {architecture} architecture")
    return f"model.layers.{number}.{in_layer[kind]}"


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
