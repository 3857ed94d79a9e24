"""What config.json says in each family of decoders, and what it leaves to the family.

Defaults are those of transformers' configuration classes: a saved config may leave them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from workers.checkpoint.fields import Fields
from workers.checkpoint.modelconfig import MAX_LAYERS, ModelConfig
from workers.checkpoint.rope import RopeScaling, read_rope, read_rope_per_layer_type
from workers.models.layertypes import every, layer_windows, no_layer, upper_layers


class _Traits(NamedTuple):
    """Where a family differs before the first number is read. activation: the only one that it is
    known with. head_dim: where the config names none; None: hidden_size / num_attention_heads."""

    activation_key: str = "hidden_act"
    activation: str = "silu"
    head_dim: int | None = None
    read_ropes: Callable[[Fields], tuple[RopeScaling, RopeScaling]] = read_rope


_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MISTRAL_WINDOW = 4096
_QWEN_FULL_LAYERS = 28
_GEMMA_WINDOW = 4096


def llama(architecture: str, fields: Fields) -> ModelConfig:
    """Llama 2 and 3, SmolLM2 and all that use their class (Touvron et al., 2023)."""
    biased = fields.boolean("attention_bias", default=False)
    return replace(
        _decoder(architecture, fields, _Traits()),
        qkv_bias=biased,
        attention_out_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


def mistral(architecture: str, fields: Fields) -> ModelConfig:
    """Mistral 7B and its descendants: a window in every layer, or none (Jiang et al., 2023)."""
    config = _decoder(architecture, fields, _Traits())
    if fields.has("layer_types"):
        raise fields.refuse("layer_types", "is not supported for this architecture")
    # null is an answer here: no window.
    if fields.names("sliding_window") and not fields.has("sliding_window"):
        return config
    window = fields.integer("sliding_window", 1, default=_MISTRAL_WINDOW)
    return replace(config, windows=(window,) * config.num_layers)


def qwen2(architecture: str, fields: Fields) -> ModelConfig:
    """Qwen2 and 2.5: biases on query, key and value; upper layers may have a window."""
    config = _decoder(architecture, fields, _Traits())
    return replace(config, qkv_bias=True, windows=_qwen_windows(fields, config.num_layers))


def qwen3(architecture: str, fields: Fields) -> ModelConfig:
    """Qwen3: normalised query and key heads instead of the biases."""
    config = _decoder(architecture, fields, _Traits(head_dim=128))
    biased = fields.boolean("attention_bias", default=False)
    return replace(
        config,
        qkv_bias=biased,
        attention_out_bias=biased,
        norm_heads=True,
        windows=_qwen_windows(fields, config.num_layers),
    )


def gemma2(architecture: str, fields: Fields) -> ModelConfig:
    """Gemma 2: soft caps, norms around each block, a window in every other layer."""
    config = _gemma(architecture, fields, read_rope)
    window = fields.integer("sliding_window", 1, default=_GEMMA_WINDOW)
    return replace(
        config,
        windows=layer_windows(fields, config.num_layers, window, every(2)),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def gemma3(architecture: str, fields: Fields) -> ModelConfig:
    """Gemma 3, text only: five layers with a window and a rope of their own, then one without."""
    config = _gemma(architecture, fields, read_rope_per_layer_type)
    if fields.has("attn_logit_softcapping"):
        # The field is there, but transformers reads it for no Gemma 3 model.
        raise fields.refuse("attn_logit_softcapping", "is not supported for this architecture")
    window = fields.integer("sliding_window", 1, default=_GEMMA_WINDOW)
    pattern = fields.integer("sliding_window_pattern", 1, default=6)
    return replace(
        config,
        windows=layer_windows(fields, config.num_layers, window, every(pattern)),
        logits_softcap=_softcap(fields, "final_logit_softcapping", 0.0),
        norm_heads=True,
    )


def _gemma(
    architecture: str,
    fields: Fields,
    read_ropes: Callable[[Fields], tuple[RopeScaling, RopeScaling]],
) -> ModelConfig:
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.refuse("use_bidirectional_attention", "is not supported: attention is causal")
    tied = fields.boolean("tie_word_embeddings", default=True)
    traits = _Traits("hidden_activation", "gelu_pytorch_tanh", 256, read_ropes)
    config = _decoder(architecture, fields, traits)
    biased = fields.boolean("attention_bias", default=False)
    return replace(
        config,
        tie_word_embeddings=tied,
        qkv_bias=biased,
        attention_out_bias=biased,
        attention_scale=fields.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        norm_outputs=True,
    )


def _softcap(fields: Fields, key: str, default: float) -> float:
    """null is an answer here: no cap."""
    if fields.has(key):
        return fields.positive(key)
    return 0.0 if fields.names(key) else default


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if not fields.boolean("use_sliding_window", default=False):
        return layer_windows(fields, num_layers, 0, no_layer)
    window = fields.integer("sliding_window", 1, default=4096)
    lowest = fields.integer("max_window_layers", 0, default=_QWEN_FULL_LAYERS)
    return layer_windows(fields, num_layers, window, upper_layers(lowest))


def _decoder(architecture: str, fields: Fields, traits: _Traits) -> ModelConfig:
    """What all families share."""
    hidden = fields.integer("hidden_size", 1)
    heads = fields.integer("num_attention_heads", 1)
    kv_heads = fields.integer("num_key_value_heads", 1, default=heads)
    if heads % kv_heads:
        raise fields.refuse(
            "num_attention_heads",
            f"must be a multiple of num_key_value_heads, got {heads} and {kv_heads}",
        )
    num_layers = fields.integer("num_hidden_layers", 1)
    if num_layers > MAX_LAYERS:
        raise fields.refuse("num_hidden_layers", f"must be at most {MAX_LAYERS}, got {num_layers}")
    activation = fields.text(traits.activation_key, default=traits.activation)
    if activation != traits.activation:
        raise fields.refuse(
            traits.activation_key, f"must be {traits.activation!r}, got {activation!r}"
        )
    head_dim = _head_dim(fields, hidden, heads, traits.head_dim)
    rope, local_rope = traits.read_ropes(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 1),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", 2),
        rope=rope,
        local_rope=local_rope,
        windows=(0,) * num_layers,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_scale=head_dim**-0.5,
        activation=_ACTIVATIONS[activation],
    )


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if default is None:
        if not fields.has("head_dim") and hidden % heads:
            raise fields.refuse(
                "hidden_size",
                f"must be a multiple of num_attention_heads where head_dim is absent, "
                f"got {hidden} and {heads}",
            )
        default = hidden // heads
    head_dim = fields.integer("head_dim", 2, default=default)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return head_dim
