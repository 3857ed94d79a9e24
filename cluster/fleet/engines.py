"""The engines a router knows, arranged so that a decision costs the same with 4 as with 1,000."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.core.sampling import counter_key
from cluster.fleet.job import Job
from cluster.fleet.snapshot import EngineSnapshot

DRAWN = 16
"""Engines looked at per decision; up to so many, all of them are."""


class EngineSet:
    """Snapshots by id. Those that could take something at all are kept apart, as the open ones.

    Draws are a function of the seed and of how many were made before, so that runs repeat; routers
    with different seeds do not rush to the same engine.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._draws = 0
        self._by_id: dict[str, EngineSnapshot] = {}
        self._everyone: list[EngineSnapshot] = []
        self._open: list[EngineSnapshot] = []
        self._place: dict[str, int] = {}
        self._with_weights: dict[str, set[str]] = {}
        """Engines that take work, by their weights."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[EngineSnapshot]:
        return iter(self._by_id.values())

    def get(self, engine_id: str) -> EngineSnapshot | None:
        return self._by_id.get(engine_id)

    def add(self, engine: EngineSnapshot) -> None:
        """A new one, or the same id anew."""
        self.remove(engine.engine_id)
        self._by_id[engine.engine_id] = engine
        self._everyone = list(self._by_id.values())
        self.changed(engine)

    def remove(self, engine_id: str) -> EngineSnapshot | None:
        engine = self._by_id.pop(engine_id, None)
        if engine is not None:
            self._everyone = list(self._by_id.values())
            self._close(engine_id)
            self._forget_weights(engine)
        return engine

    def changed(self, engine: EngineSnapshot) -> None:
        """To be called whenever its load, what is on the way to it, or its drain has changed."""
        if engine.draining:
            self._forget_weights(engine)
        else:
            self._with_weights.setdefault(engine.weights, set()).add(engine.engine_id)
        is_open = not engine.draining and engine.has_room(1)
        known = engine.engine_id in self._place
        if is_open and not known:
            self._place[engine.engine_id] = len(self._open)
            self._open.append(engine)
        elif known and not is_open:
            self._close(engine.engine_id)

    def suits(self, engine: EngineSnapshot, job: Job) -> bool:
        """Whether the job may go on with this engine's weights: with its own as long as anybody
        takes work who has them. New weights that are rolled out do not change what runs."""
        return engine.weights == job.weights or job.weights not in self._with_weights

    def draw_open(self, most: int = DRAWN) -> list[EngineSnapshot]:
        """Up to `most` different open engines: all of them, or drawn at random."""
        return self._draw(self._open, most)

    def draw(self, most: int = DRAWN) -> list[EngineSnapshot]:
        """The same of all engines that are not draining."""
        return [e for e in self._draw(self._everyone, most) if not e.draining]

    def _draw(self, pool: list[EngineSnapshot], most: int) -> list[EngineSnapshot]:
        if len(pool) <= most:
            return list(pool)
        self._draws += 1
        # A random stride through the pool from a random start: different engines, two numbers.
        key = counter_key(self._seed, self._draws)
        start, stride = key % len(pool), 1 + (key >> 32) % (len(pool) - 1)
        picked = {(start + i * stride) % len(pool): None for i in range(most)}
        return [pool[i] for i in picked]

    def _forget_weights(self, engine: EngineSnapshot) -> None:
        holders = self._with_weights.get(engine.weights)
        if holders is not None:
            holders.discard(engine.engine_id)
            if not holders:
                del self._with_weights[engine.weights]

    def _close(self, engine_id: str) -> None:
        at = self._place.pop(engine_id, None)
        if at is None:
            return
        last = self._open.pop()
        if last.engine_id != engine_id:
            self._open[at] = last
            self._place[last.engine_id] = at
