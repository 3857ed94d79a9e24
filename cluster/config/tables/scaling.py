"""How many engines, when that is not a fixed number; and how replicas are replaced."""

from __future__ import annotations

from functools import partial

from cluster.config.option import INTEGER, NUMBER, Limits, Option, above, at_least
from cluster.fleet.scaling import MAX_ENGINES, ScalingSettings

_DEFAULTS = ScalingSettings()

_scaling = partial(Option, "autoscaling")
_rollout = partial(Option, "rollout")

AUTOSCALING = (
    _scaling(
        "max_engines",
        INTEGER,
        None,
        "engines at most; giving it turns autoscaling on, and fleet.engines is what it begins with",
        limits=Limits(1, MAX_ENGINES),
        unit="N",
        unset="no autoscaling: fleet.engines engines",
        example=8,
    ),
    _scaling(
        "min_engines",
        INTEGER,
        1,
        "engines at least; with 0 an idle fleet has none, and requests wait for the one they wake",
        limits=Limits(0, MAX_ENGINES),
        unit="N",
    ),
    _scaling(
        "target_load",
        NUMBER,
        _DEFAULTS.target_load,
        "share of its KV cache or of its sequences that an engine should have in use",
        limits=Limits(0.0, 1.0, low_open=True),
    ),
    _scaling(
        "scale_ttft",
        NUMBER,
        None,
        "ask for more engines when a newcomer's first token would take longer",
        limits=above(0.0),
        unit="SECONDS",
        unset="load alone decides",
        example=2.0,
    ),
    _scaling(
        "up_delay",
        NUMBER,
        _DEFAULTS.up_delay_s,
        "how long more engines must be wanted before one starts",
        limits=at_least(0.0),
        unit="SECONDS",
    ),
    _scaling(
        "down_delay",
        NUMBER,
        _DEFAULTS.down_delay_s,
        "how long fewer engines must be enough before one is drained",
        limits=at_least(0.0),
        unit="SECONDS",
    ),
    _scaling(
        "zero_delay",
        NUMBER,
        _DEFAULTS.zero_delay_s,
        "how long there must be nothing to do before the last engine is drained",
        limits=at_least(0.0),
        unit="SECONDS",
    ),
)

ROLLOUT = (
    _rollout(
        "engine_drain",
        NUMBER,
        60.0,
        "how long an engine that is to go may finish what it has; the rest goes on elsewhere",
        limits=at_least(0.0),
        unit="SECONDS",
    ),
    _rollout(
        "router_drain",
        NUMBER,
        300.0,
        "how long a router that is replaced may finish its streams; the rest has to be resumed",
        limits=at_least(1.0),
        unit="SECONDS",
    ),
)
