"""A Llama GGUF file as an ordinary Hugging Face folder: config, weights, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.core.errors import ModelError

_CONTROL_TOKEN = 3
"""tokenizer.ggml.token_type of tokens that stand for themselves and are never merged."""

_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

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


def convert(source: Path, target: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, model.safetensors (bf16), tokenizer.json,
    tokenizer_config.json and special_tokens_map.json into the existing folder `target`.

    Raises ModelError for a file of another architecture or tokenizer, OSError when the disk is
    full.
    """
    reader = gguf.GGUFReader(source)
    metadata = GgufMetadata(reader, source)
    metadata.expect("general.architecture", "llama")
    metadata.expect("tokenizer.ggml.model", "gpt2")
    # The pre-tokenizer decides where words end: another one would encode other ids.
    metadata.expect("tokenizer.ggml.pre", "smollm")
    tensor_names = {tensor.name for tensor in reader.tensors}
    _write_json(target / "config.json", _config(metadata, tensor_names))
    _write_json(target / "generation_config.json", _special_ids(metadata))
    _write_tokenizer(metadata, target)
    weights = dict(_weights(reader, metadata, progress))
    weights_file = target / "model.safetensors"
    save_file(weights, weights_file, metadata={"format": "pt"})
    # safetensors writes for the owner alone; a model baked into an image is read by others.
    weights_file.chmod(0o644)


def _config(metadata: GgufMetadata, tensor_names: set[str]) -> dict[str, Any]:
    def number(key: str) -> Any:
        return metadata.get(f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens")),
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        # Stored as fp32; the shortest decimal that is the same fp32 is what was meant.
        "rms_norm_eps": float(str(np.float32(number("attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(number("rope.freq_base")),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **_special_ids(metadata),
    }


def _special_ids(metadata: GgufMetadata) -> dict[str, int]:
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


# -- tokenizer ---------------------------------------------------------------------------------


def _write_tokenizer(metadata: GgufMetadata, target: Path) -> None:
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    _tokenizer(metadata, tokens).save(str(target / "tokenizer.json"))
    ids = _special_ids(metadata)
    special = {
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[metadata.get("tokenizer.ggml.unknown_token_id")],
    }
    _write_json(target / "special_tokens_map.json", special)
    config = {
        # The generic class takes tokenizer.json as it is; GPT2Tokenizer would rebuild it and
        # lose the rule that digits stand alone.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **special,
    }
    _write_json(target / "tokenizer_config.json", config)


def _tokenizer(metadata: GgufMetadata, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE in which each digit is a word of its own."""
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


# -- weights -----------------------------------------------------------------------------------


def _weights(
    reader: gguf.GGUFReader, metadata: GgufMetadata, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {
        "attn_q.weight": metadata.get("llama.attention.head_count"),
        "attn_k.weight": metadata.get("llama.attention.head_count_kv"),
    }
    for done, tensor in enumerate(reader.tensors, start=1):
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".", 2)[-1]
        if kind in heads:
            array = undo_rope_permutation(array, heads[kind])
        # A copy: what is not quantised is a view of the read-only file.
        weight = torch.from_numpy(np.array(array, dtype=np.float32)).to(torch.bfloat16)
        yield _hugging_face_name(tensor.name), weight
        progress(done / len(reader.tensors))


def undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves each head's rotary pairs (i, i + half) as (2i, 2i + 1); put them back.

    weight: [heads * head_dim, hidden] -> the same shape.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hugging_face_name(name: str) -> str:
    if name in _TENSOR_NAMES:
        return _TENSOR_NAMES[name]
    prefix, _, rest = name.partition(".")
    number, _, kind = rest.partition(".")
    if prefix != "blk" or kind not in _LAYER_TENSOR_NAMES:
        raise ModelError(f"GGUF tensor {name!r} is not part of the llama architecture")
    return f"model.layers.{number}.{_LAYER_TENSOR_NAMES[kind]}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
