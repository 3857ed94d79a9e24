"""Cluster-wide preemption: who has no blocks at home goes on where there are some.

An engine that runs out of blocks preempts as it always does; the victim then holds nothing, so
replaying it elsewhere costs no more than replaying it at home, and it need not wait. The same goes
for whoever has not begun yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.config import blocks_for
from cluster.core.errors import ConfigError
from cluster.fleet.engines import EngineSet
from cluster.fleet.job import Job
from cluster.fleet.snapshot import EngineSnapshot

MAX_MOVES = 100


@dataclass(frozen=True, slots=True)
class ReliefSettings:
    """max_moves: of one request; 0 turns relief off. margin: share of the target's pool that must
    be left beyond the whole sequence, so that it does not become a victim there."""

    max_moves: int = 3
    margin: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.max_moves <= MAX_MOVES:
            raise ConfigError(f"max_moves must be between 0 and {MAX_MOVES}, got {self.max_moves}")
        if not 0.0 <= self.margin < 1.0:
            raise ConfigError(f"margin must be in [0, 1), got {self.margin!r}")


class Waiting(NamedTuple):
    """A job that has no blocks at its engine. tokens: prompt and emitted."""

    job: Job
    tokens: int


class Relief:
    """Finds a better place for those who wait."""

    def __init__(self, settings: ReliefSettings) -> None:
        self._settings = settings

    def stuck(self, home: EngineSnapshot, waiting: Iterable[Waiting]) -> list[Waiting]:
        """Of those who wait at `home`, in its order, the ones who will not come in at its next
        step and may still be moved."""
        load = home.load
        if load is None or not self._settings.max_moves:
            return []
        room = load.room
        lanes = home.capacity.max_num_seqs - load.running
        stuck: list[Waiting] = []
        moving_up = True
        for entry in waiting:
            blocks = blocks_for(entry.tokens, home.capacity.block_size)
            # Nobody overtakes: behind the first who has to wait, all do.
            moving_up = moving_up and lanes > 0 and blocks <= room
            if moving_up:
                lanes -= 1
                room -= blocks
            elif entry.job.moves < self._settings.max_moves:
                stuck.append(entry)
        return stuck

    def target(
        self, home: EngineSnapshot, entry: Waiting, engines: EngineSet
    ) -> EngineSnapshot | None:
        """The engine with the most room, if it can take the whole sequence and keep its margin."""
        job = entry.job
        fitting = [
            engine
            for engine in engines.draw_open()
            if engine.engine_id != home.engine_id
            and engine.can_hold(job.sequence_len)
            and engines.suits(engine, job)
            and engine.has_room(entry.tokens + self._margin_tokens(engine))
        ]
        if not fitting:
            return None
        return max(fitting, key=lambda e: (e.room * e.capacity.block_size, e.engine_id))

    def _margin_tokens(self, engine: EngineSnapshot) -> int:
        return int(self._settings.margin * engine.capacity.pool_tokens)
