"""Rotary embeddings as config.json describes them, in both of its spellings."""

from __future__ import annotations

from dataclasses import dataclass

from workers.checkpoint.fields import Fields

DEFAULT_THETA = 10_000.0


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


def read_rope(fields: Fields) -> tuple[RopeScaling, RopeScaling]:
    """The same for layers without and with a sliding window.

    Both spellings: rope_parameters (transformers 5), rope_scaling with rope_theta (before).
    """
    rope = fields.child("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    _refuse_partial(fields)
    parsed = parse_rope(rope, fields.positive("rope_theta", default=DEFAULT_THETA))
    return parsed, parsed


def read_rope_per_layer_type(fields: Fields) -> tuple[RopeScaling, RopeScaling]:
    """One for layers that see everything, one for layers with a sliding window (Gemma 3).

    Both spellings: rope_parameters with an object per type of layer (transformers 5);
    rope_theta with rope_scaling, and rope_local_base_freq, before.
    """
    _refuse_partial(fields)
    theta = fields.positive("rope_theta", default=1_000_000.0)
    local_theta = fields.positive("rope_local_base_freq", default=DEFAULT_THETA)
    if not fields.has("rope_parameters"):
        return parse_rope(fields.child("rope_scaling"), theta), RopeScaling(local_theta)
    both = fields.child("rope_parameters")
    for name in ("full_attention", "sliding_attention"):
        if not both.has(name):
            raise both.refuse(name, "is missing")
    full = parse_rope(both.child("full_attention"), theta)
    return full, parse_rope(both.child("sliding_attention"), local_theta)


def parse_rope(rope: Fields, theta: float) -> RopeScaling:
    """The object that describes one embedding. theta: where it names none itself."""
    _refuse_partial(rope)
    for name in ("full_attention", "sliding_attention"):
        if rope.has(name):
            raise rope.refuse(name, "is not supported: this model has one rotary embedding")
    theta = rope.positive("rope_theta", default=theta)
    # "type" is what rope_type was called before transformers 4.43.
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", default="default")
    if kind == "default":
        return RopeScaling(theta)
    if kind == "linear":
        return RopeScaling(theta, kind, rope.positive("factor"))
    if kind == "llama3":
        return _llama3_rope(rope, theta)
    raise rope.refuse("rope_type", f"must be 'default', 'linear' or 'llama3', got {kind!r}")


def _refuse_partial(place: Fields) -> None:
    if place.positive("partial_rotary_factor", default=1.0) != 1.0:
        raise place.refuse("partial_rotary_factor", "other than 1 is not supported")


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
