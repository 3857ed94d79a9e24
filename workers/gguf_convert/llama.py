"""Llama in GGUF, with a byte-level BPE tokenizer in which digits stand alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.gguf_convert.metadata import (
    CONTROL_TOKEN,
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
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


def config(metadata: GgufMetadata, tensor_names: set[str]) -> dict[str, Any]:
    """config.json. Raises ModelError for another tokenizer than the one that is rebuilt here."""
    metadata.expect("tokenizer.ggml.model", "gpt2")
    # The pre-tokenizer decides where words end: another one would encode other ids.
    metadata.expect("tokenizer.ggml.pre", "smollm")

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
        "rms_norm_eps": shortest(number("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(number("rope.freq_base")),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **special_ids(metadata),
    }


# -- tokenizer ---------------------------------------------------------------------------------


def write_tokenizer(metadata: GgufMetadata, target: Path) -> None:
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    _tokenizer(metadata, tokens).save(str(target / "tokenizer.json"))
    special = special_tokens(metadata, tokens)
    write_json(target / "special_tokens_map.json", special)
    tokenizer_config = {
        # The generic class takes tokenizer.json as it is; GPT2Tokenizer would rebuild it and
        # lose the rule that digits stand alone.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **special,
    }
    write_json(target / "tokenizer_config.json", tokenizer_config)


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
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


# -- weights -----------------------------------------------------------------------------------


def weights(
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
        yield hugging_face_name(tensor.name, _LAYER_TENSOR_NAMES, "llama"), weight
        progress(done / len(reader.tensors))


def undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves each head's rotary pairs (i, i + half) as (2i, 2i + 1); put them back.

    weight: [heads * head_dim, hidden] -> the same shape.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
