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

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""GGUF -> Hugging Face, of every decoder, outside of its layers."""
LAYER_TENSOR_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""The same within a layer; the other norms have names of their own in each architecture."""

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


def hugging_face_name(name: str, in_layer: Mapping[str, str], architecture: str) -> str:
    """in_layer: GGUF names of a layer's tensors -> Hugging Face's, both without the layer's prefix.

    Raises ModelError for a tensor that is neither in a layer nor of every decoder."""
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    prefix, _, rest = name.partition(".")
    number, _, kind = rest.partition(".")
    if prefix != "blk" or kind not in in_layer:
        raise ModelError(f"GGUF tensor {name!r} is not part of the {architecture} architecture")
    return f"model.layers.{number}.{in_layer[kind]}"


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
