"""Which layers have a sliding window: as config.json lists them, or by the family's rule."""

from __future__ import annotations

from collections.abc import Callable

from workers.checkpoint.fields import Fields

SLIDING, FULL = "sliding_attention", "full_attention"

Rule = Callable[[int], bool]
"""Whether the layer of this number, from 0, has a window."""


def no_layer(layer: int) -> bool:
    return False


def every(period: int) -> Rule:
    """All layers but the last of each `period`."""
    return lambda layer: (layer + 1) % period != 0


def upper_layers(lowest: int) -> Rule:
    return lambda layer: layer >= lowest


def layer_windows(fields: Fields, num_layers: int, window: int, rule: Rule) -> tuple[int, ...]:
    """Each layer's window, 0 for none: by layer_types where it is given, else by `rule`.

    window: of the layers that have one; 0 where no layer may. Raises ModelError.
    """
    types = fields.raw("layer_types")
    if types is None:
        return tuple(window if rule(layer) else 0 for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.refuse("layer_types", f"must be a list of {num_layers} names, got {types!r}")
    for name in types:
        if name not in (SLIDING, FULL):
            raise fields.refuse(
                "layer_types", f"must name {SLIDING!r} and {FULL!r} only, got {name!r}"
            )
    if SLIDING in types and not window:
        raise fields.refuse("layer_types", f"names {SLIDING!r}, but use_sliding_window is false")
    return tuple(window if name == SLIDING else 0 for name in types)
