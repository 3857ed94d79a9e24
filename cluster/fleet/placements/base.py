"""What every placement is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cluster.fleet.engines import EngineSet
from cluster.fleet.job import Job
from cluster.fleet.snapshot import EngineSnapshot


class Candidates(NamedTuple):
    """drawn: engines that may take the job, at least one; all that may where there are few engines.
    fleet: all engines, for a placement that has one in mind; it may take it if `fits` says so."""

    drawn: Sequence[EngineSnapshot]
    fleet: EngineSet
    fits: Callable[[EngineSnapshot], bool]


class Placement(Protocol):
    """Chooses an engine for a job. What must hold anyway (size, room, drain) was seen to.

    The choice is a function of what it is given and of its own state, so that the simulator's runs
    repeat.
    """

    name: str

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        """One of those drawn, or another that fits."""

    def placed(self, engine: EngineSnapshot, job: Job) -> None:
        """The job went there."""

    def joined(self, engine: EngineSnapshot) -> None:
        """The engine is new."""

    def left(self, engine_id: str) -> None:
        """The engine is gone, and its cache with it."""


class Stateless:
    """For placements that learn nothing."""

    def placed(self, engine: EngineSnapshot, job: Job) -> None:
        """Nothing is kept."""

    def joined(self, engine: EngineSnapshot) -> None:
        """Nothing is kept."""

    def left(self, engine_id: str) -> None:
        """Nothing was kept."""
