"""config.json of a decoder-only transformer, as typed and checked facts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from workers.checkpoint.fields import Fields, read_json

CONFIG_FILE = "config.json"
DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequencies of the rotary embedding.

    theta: base wavelength. kind: "default", "linear" or "llama3". factor: what linear and
    llama3 divide (some of) the frequencies by; 1.0 for default. The last three describe the
    band in which llama3 interpolates (Llama 3.1 model card) and are 0 for the other kinds.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of one checkpoint, sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeScaling
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(folder: Path, supported: Collection[str]) -> ModelConfig:
    """Read and check `folder`/config.json. `supported`: the architectures that may be named.

    Raises ModelError for a missing or nonsensical value, and for every feature that would
    change the numbers but is not implemented (quantised weights, other activations, other
    rope scalings).
    """
    path = folder / CONFIG_FILE
    fields = Fields(read_json(path), str(path))
    architecture = _architecture(fields, supported)
    _refuse_unsupported(fields)
    hidden = fields.integer("hidden_size", 1)
    heads = fields.integer("num_attention_heads", 1)
    kv_heads = fields.integer("num_key_value_heads", 1, default=heads)
    if heads % kv_heads:
        raise fields.refuse(
            "num_attention_heads",
            f"must be a multiple of num_key_value_heads, got {heads} and {kv_heads}",
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 1),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 1),
        num_layers=fields.integer("num_hidden_layers", 1),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, hidden, heads),
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", 2),
        rope=_rope(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        attention_bias=fields.boolean("attention_bias", default=False),
        mlp_bias=fields.boolean("mlp_bias", default=False),
    )


def _architecture(fields: Fields, supported: Collection[str]) -> str:
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.refuse("architectures", f"must be a list of one name, got {names!r}")
    if names[0] not in supported:
        raise fields.refuse(
            "architectures", f"must be one of {sorted(supported)}, got {names[0]!r}"
        )
    return names[0]


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("quantization_config"):
        raise fields.refuse("quantization_config", "is not supported: use unquantised weights")
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise fields.refuse("hidden_act", f"must be 'silu', got {activation!r}")


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if not fields.has("head_dim") and hidden % heads:
        raise fields.refuse(
            "hidden_size",
            f"must be a multiple of num_attention_heads where head_dim is absent, "
            f"got {hidden} and {heads}",
        )
    head_dim = fields.integer("head_dim", 2, default=hidden // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _rope(fields: Fields) -> RopeScaling:
    """Both spellings: rope_parameters (transformers 5), rope_scaling with rope_theta (before)."""
    rope = fields.child("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = fields.positive("rope_theta", default=DEFAULT_ROPE_THETA)
    theta = rope.positive("rope_theta", default=theta)
    for place in (fields, rope):
        if place.positive("partial_rotary_factor", default=1.0) != 1.0:
            raise place.refuse("partial_rotary_factor", "other than 1 is not supported")
    # "type" is what rope_type was called before transformers 4.43.
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", default="default")
    if kind == "default":
        return RopeScaling(theta)
    if kind == "linear":
        return RopeScaling(theta, kind, rope.positive("factor"))
    if kind == "llama3":
        return _llama3_rope(rope, theta)
    raise rope.refuse("rope_type", f"must be 'default', 'linear' or 'llama3', got {kind!r}")


def _llama3_rope(rope: Fields, theta: float) -> RopeScaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise rope.refuse(
            "high_freq_factor", f"must be above low_freq_factor, got {high:g} and {low:g}"
        )
    return RopeScaling(
        theta,
        "llama3",
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=rope.integer("original_max_position_embeddings", 1),
    )
