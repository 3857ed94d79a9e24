"""Placements that do not compare all engines."""

from __future__ import annotations

from cluster.core.sampling import counter_key
from cluster.fleet.job import Job
from cluster.fleet.placements.base import Candidates, Stateless
from cluster.fleet.snapshot import EngineSnapshot


class RoundRobin(Stateless):
    """One after the other, by weight: an engine with twice the pool comes up twice as often.

    Smooth weighted round robin (as nginx has it): every engine earns its weight per turn, the one
    with most credit is taken and pays the sum.
    """

    name = "round-robin"

    def __init__(self) -> None:
        self._credit: dict[str, int] = {}

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        credit, total = self._credit, 0
        for engine in candidates.drawn:
            weight = engine.capacity.pool_tokens
            total += weight
            credit[engine.engine_id] = credit.get(engine.engine_id, 0) + weight
        chosen = max(candidates.drawn, key=lambda e: (credit[e.engine_id], e.engine_id))
        credit[chosen.engine_id] -= total
        return chosen

    def left(self, engine_id: str) -> None:
        self._credit.pop(engine_id, None)


class PowerOfTwo(Stateless):
    """The less loaded of two (Mitzenmacher, 2001): with many routers, that all see the same frames,
    it keeps them from rushing to the same engine."""

    name = "power-of-two"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._draws = 0

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        drawn = candidates.drawn
        if len(drawn) == 1:
            return drawn[0]
        self._draws += 1
        key = counter_key(self._seed, self._draws)
        first = key % len(drawn)
        second = (first + 1 + (key >> 32) % (len(drawn) - 1)) % len(drawn)
        return min(
            (drawn[first], drawn[second]), key=lambda e: (e.outstanding, e.streams, e.engine_id)
        )
