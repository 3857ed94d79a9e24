"""How a simulated fleet places requests, by names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.core.errors import ConfigError
from cluster.core.sampling import counter_uniform
from cluster.fleet.binding import Binding, EagerBinding, LateBinding
from cluster.fleet.dispatch import Courier, Fleet, FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.fleet.job import Job
from cluster.fleet.placements.base import Candidates, Placement, Stateless
from cluster.fleet.placements.registry import PLACEMENTS, make_placement
from cluster.fleet.relief import ReliefSettings
from cluster.fleet.snapshot import EngineSnapshot

BINDINGS: dict[str, Callable[[], Binding]] = {
    LateBinding.name: LateBinding,
    EagerBinding.name: EagerBinding,
}
SKEWED = "skewed"


class Skewed(Stateless):
    """Bad luck on purpose: engine i gets its share of the requests, whatever it has to do."""

    name = SKEWED

    def __init__(self, shares: tuple[float, ...], seed: int = 0) -> None:
        self._shares = shares
        self._seed = seed
        self._drawn = 0

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        engines = sorted(candidates.fleet, key=lambda e: e.engine_id)
        self._drawn += 1
        mark = counter_uniform(self._seed, self._drawn) * sum(self._shares)
        for engine, share in zip(engines, self._shares, strict=False):
            mark -= share
            if mark < 0:
                return engine
        return engines[-1]


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """placement: a name, or "skewed" with `shares`. binding: "late" or "eager". relief: max_moves 0
    is recompute at home only."""

    placement: str = "least-loaded"
    binding: str = EagerBinding.name
    relief: ReliefSettings = field(default_factory=lambda: ReliefSettings(max_moves=0))
    gate: GateSettings = field(default_factory=lambda: GateSettings(queue_timeout_s=float("inf")))
    shares: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.binding not in BINDINGS:
            raise ConfigError(f"binding must be one of {list(BINDINGS)}, got {self.binding!r}")
        if self.placement != SKEWED and self.placement not in PLACEMENTS:
            names = [*PLACEMENTS, SKEWED]
            raise ConfigError(f"placement must be one of {names}, got {self.placement!r}")

    @property
    def reacts(self) -> bool:
        """Whether an engine's frame may make another one do something."""
        return self.binding == LateBinding.name or self.relief.max_moves > 0

    def build(self, courier: Courier) -> Fleet:
        settings = FleetSettings(self.gate, self.relief, self.seed)
        return Fleet(courier, self._make_placement(), settings, BINDINGS[self.binding]())

    def _make_placement(self) -> Placement:
        if self.placement == SKEWED:
            return Skewed(self.shares, self.seed)
        return make_placement(self.placement)
