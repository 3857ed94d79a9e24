"""The engine with the least to do."""

from __future__ import annotations

from cluster.fleet.job import Job
from cluster.fleet.placements.base import Candidates, Stateless
from cluster.fleet.snapshot import EngineSnapshot


class LeastLoaded(Stateless):
    """Fewest waiting tokens first, then fewest sequences, then the freest cache; a name breaks
    ties, so that the choice is the same everywhere."""

    name = "least-loaded"

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        return min(
            candidates.drawn, key=lambda e: (e.waiting_tokens, e.streams, e.kv_use, e.engine_id)
        )


class LeastOutstanding(Stateless):
    """Least tokens held and to be computed, as a share of the pool: larger engines get more."""

    name = "least-outstanding"

    def choose(self, candidates: Candidates, job: Job) -> EngineSnapshot:
        return min(candidates.drawn, key=lambda e: (e.outstanding, e.streams, e.engine_id))
