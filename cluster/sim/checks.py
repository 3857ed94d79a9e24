"""The books checked after every step of a simulation, as in the property tests."""

from __future__ import annotations

from cluster.core.invariants import check_scheduler
from cluster.core.plan import StepPlan
from cluster.engine.core import StepReport
from cluster.sim.engine import SimEngine
from cluster.sim.simulation import Observer


class CheckedSteps:
    """An Observer that raises InvariantViolation at the first step after which blocks, states or
    queues do not add up. O(blocks + sequences) per step, so it is for looking for a bug."""

    def __init__(self, following: Observer | None = None) -> None:
        self.steps = 0
        self._following = following

    def stepped(self, engine: SimEngine, plan: StepPlan, report: StepReport, now: float) -> None:
        """Checks, then passes the step on."""
        check_scheduler(engine.core.scheduler)
        self.steps += 1
        if self._following is not None:
            self._following.stepped(engine, plan, report, now)
