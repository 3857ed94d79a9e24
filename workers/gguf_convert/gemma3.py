"""Gemma 3 (text) in GGUF, with a SentencePiece tokenizer (Gemma Team, 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from workers.gguf_convert import sentencepiece
from workers.gguf_convert.metadata import (
    LAYER_TENSOR_NAMES,
    GgufMetadata,
    Progress,
    hugging_face_name,
    shortest,
    special_ids,
    special_tokens,
    write_json,
)

_LAYER_TENSOR_NAMES = {
    **LAYER_TENSOR_NAMES,
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_LOCAL_ROPE_BASE = 10_000.0
"""Of layers with a window; the same for all of the family and not in the file."""
_PATTERN = 6
"""Every so many layers one sees all; likewise."""


def config(metadata: GgufMetadata, tensor_names: set[str]) -> dict[str, Any]:
    """config.json. Raises ModelError for another tokenizer than the one that is rebuilt here."""
    metadata.expect("tokenizer.ggml.model", "llama")

    def number(key: str) -> Any:
        return metadata.get(f"gemma3.{key}")

    layers, head_dim = number("block_count"), number("attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens")),
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": shortest(number("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(number("rope.freq_base")),
        "rope_local_base_freq": _LOCAL_ROPE_BASE,
        "sliding_window": number("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % _PATTERN else "full_attention"
            for layer in range(layers)
        ],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": "bfloat16",
        **special_ids(metadata),
    }


def write_tokenizer(metadata: GgufMetadata, target: Path) -> None:
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    tokenizer = sentencepiece.build(
        tokens,
        metadata.get("tokenizer.ggml.scores"),
        metadata.get("tokenizer.ggml.token_type"),
        bos=special_ids(metadata)["bos_token_id"],
    )
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    special = special_tokens(metadata, tokens)
    write_json(target / "special_tokens_map.json", special)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("gemma3.context_length"),
        **special,
    }
    if metadata.has("tokenizer.chat_template"):
        tokenizer_config["chat_template"] = metadata.get("tokenizer.chat_template")
    write_json(target / "tokenizer_config.json", tokenizer_config)


def weights(
    reader: gguf.GGUFReader, metadata: GgufMetadata, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    for done, tensor in enumerate(reader.tensors, start=1):
        array = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = hugging_face_name(tensor.name, _LAYER_TENSOR_NAMES, "gemma3")
        if name.endswith("norm.weight"):
            # The model multiplies by 1 + w; GGUF holds the sum.
            array -= 1.0
        yield name, torch.from_numpy(array).to(torch.bfloat16)
        progress(done / len(reader.tensors))
