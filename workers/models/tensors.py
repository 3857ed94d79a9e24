"""The tensors of a decoder's checkpoint: names, shapes, and how each dimension is split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from typing import NamedTuple

from workers.checkpoint.modelconfig import ModelConfig
from workers.parallel.collectives import Shard
from workers.parallel.heads import Span, split, split_heads, whole

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

PLAIN_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Before attention and before the MLP, in a layer that normalises nothing else."""
BEFORE_BLOCKS = ("input_layernorm", "pre_feedforward_layernorm")
AFTER_BLOCKS = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Around attention and around the MLP, in a layer that normalises what they return."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class Axis(Enum):
    """What a dimension counts. All but HIDDEN and HEAD_DIM are split over the ranks."""

    HIDDEN = "hidden"
    QUERY = "query heads"
    KV = "KV heads"
    HEAD_DIM = "head size"
    INNER = "intermediate"
    VOCAB = "vocabulary"


class TensorSpec(NamedTuple):
    """One tensor of the checkpoint, outermost dimension first."""

    name: str
    axes: tuple[Axis, ...]


Spans = Mapping[Axis, Span]
"""What a rank holds of each kind of dimension, in elements."""


def spans_of(config: ModelConfig, shard: Shard) -> Spans:
    heads = split_heads(config.num_heads, config.num_kv_heads, shard)
    return {
        Axis.HIDDEN: whole(config.hidden_size),
        Axis.QUERY: heads.query.times(config.head_dim),
        Axis.KV: heads.kv.times(config.head_dim),
        Axis.HEAD_DIM: whole(config.head_dim),
        Axis.INNER: split(config.intermediate_size, shard),
        Axis.VOCAB: split(config.vocab_size, shard),
    }


def decoder_tensors(config: ModelConfig, found: Set[str]) -> Iterator[TensorSpec]:
    """Every tensor that the checkpoint must hold. One that it may hold, the head of a tied
    checkpoint, is named only where it is in `found`."""
    yield TensorSpec(EMBEDDING, (Axis.VOCAB, Axis.HIDDEN))
    yield TensorSpec(FINAL_NORM, (Axis.HIDDEN,))
    if not config.tie_word_embeddings or HEAD in found:
        yield TensorSpec(HEAD, (Axis.VOCAB, Axis.HIDDEN))
    for number in range(config.num_layers):
        yield from _layer_tensors(config, f"model.layers.{number}.")


def _layer_tensors(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    for norm in (*BEFORE_BLOCKS, *AFTER_BLOCKS) if config.norm_outputs else PLAIN_NORMS:
        yield TensorSpec(f"{prefix}{norm}.weight", (Axis.HIDDEN,))
    for norm in HEAD_NORMS if config.norm_heads else ():
        yield TensorSpec(f"{prefix}{norm}.weight", (Axis.HEAD_DIM,))
    for name, out, into, biased in (
        ("self_attn.q_proj", Axis.QUERY, Axis.HIDDEN, config.qkv_bias),
        ("self_attn.k_proj", Axis.KV, Axis.HIDDEN, config.qkv_bias),
        ("self_attn.v_proj", Axis.KV, Axis.HIDDEN, config.qkv_bias),
        ("self_attn.o_proj", Axis.HIDDEN, Axis.QUERY, config.attention_out_bias),
        ("mlp.gate_proj", Axis.INNER, Axis.HIDDEN, config.mlp_bias),
        ("mlp.up_proj", Axis.INNER, Axis.HIDDEN, config.mlp_bias),
        ("mlp.down_proj", Axis.HIDDEN, Axis.INNER, config.mlp_bias),
    ):
        yield TensorSpec(f"{prefix}{name}.weight", (out, into))
        if biased:
            yield TensorSpec(f"{prefix}{name}.bias", (out,))


def expected_tensors(config: ModelConfig, found: Set[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of `decoder_tensors`."""
    full = spans_of(config, Shard())
    for name, axes in decoder_tensors(config, found):
        yield name, tuple(full[axis].size for axis in axes)


def local_elements(config: ModelConfig, found: Set[str], shard: Shard) -> int:
    """Elements of all tensors that a rank holds, its filling included."""
    spans = spans_of(config, shard)
    return sum(
        math.prod(spans[axis].size for axis in spec.axes) for spec in decoder_tensors(config, found)
    )
