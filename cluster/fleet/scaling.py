"""How many engines a fleet should have: from what they hold, what waits, and how long it waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.errors import ConfigError

MAX_ENGINES = 4096


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """min_engines may be 0: with nothing to do, no engine runs; requests wait at the router for the
    one they wake. target_load: share of its pool or of its lanes that an engine should have in use,
    the rest being for what comes. ttft_objective_s: more engines are asked for when a newcomer's
    first token would take longer; None looks at load alone. up_delay_s, down_delay_s, zero_delay_s:
    how long a larger, a smaller number or none at all must be wanted before it is acted upon.
    """

    min_engines: int = 1
    max_engines: int = 1
    target_load: float = 0.7
    ttft_objective_s: float | None = None
    up_delay_s: float = 5.0
    down_delay_s: float = 120.0
    zero_delay_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_engines <= self.max_engines:
            raise ConfigError(
                f"min_engines must be between 0 and max_engines ({self.max_engines}), "
                f"got {self.min_engines}"
            )
        if not 1 <= self.max_engines <= MAX_ENGINES:
            raise ConfigError(
                f"max_engines must be between 1 and {MAX_ENGINES}, got {self.max_engines}"
            )
        if not 0.0 < self.target_load <= 1.0:
            raise ConfigError(f"target_load must be in (0, 1], got {self.target_load!r}")
        for name in ("up_delay_s", "down_delay_s", "zero_delay_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        objective = self.ttft_objective_s
        if objective is not None and not 0.0 < objective < math.inf:
            raise ConfigError(f"ttft_objective_s must be above 0, got {objective!r}")


class EngineUse(NamedTuple):
    """outstanding: tokens held or to be computed, as a share of the engine's pool; above 1 it has
    more to do than it can hold. lanes: running and waiting sequences as a share of max_num_seqs."""

    outstanding: float
    lanes: float

    @property
    def load(self) -> float:
        return max(self.outstanding, self.lanes)


class FleetDemand(NamedTuple):
    """What waits at routers. tokens: of prompts and emitted ones. ttft_s: predicted for a newcomer,
    0 while nothing is known."""

    queued: int = 0
    tokens: int = 0
    ttft_s: float = 0.0

    def plus(self, other: FleetDemand) -> FleetDemand:
        """Of two routers together: the worse prediction counts."""
        return FleetDemand(
            self.queued + other.queued,
            self.tokens + other.tokens,
            max(self.ttft_s, other.ttft_s),
        )


def wanted_engines(
    settings: ScalingSettings,
    engines: Sequence[EngineUse],
    demand: FleetDemand,
    pool_tokens: float,
) -> int:
    """Engines that would have the target load with everything that is there and that waits.

    engines: those that run. pool_tokens: KV positions of one engine, about. The number of tokens
    grows while a request runs, which is what the margin below target_load = 1 is for.
    """
    held = sum(engine.load for engine in engines)
    waiting = demand.tokens / pool_tokens if pool_tokens > 0 else float(demand.queued > 0)
    wanted = math.ceil((held + waiting) / settings.target_load - 1e-9)
    objective = settings.ttft_objective_s
    if objective is not None and demand.ttft_s > objective:
        # In proportion, but no more than twice as many at a time: predictions overshoot.
        late = min(demand.ttft_s / objective, 2.0)
        wanted = max(wanted, math.ceil(len(engines) * late), len(engines) + 1)
    if held > 0.0 or demand.queued:
        wanted = max(wanted, 1)
    return min(max(wanted, settings.min_engines), settings.max_engines)
