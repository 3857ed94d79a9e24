"""An executor that takes the next step before the last one is done, over the recording cache."""

from __future__ import annotations

from collections import deque

from cluster.core.errors import InvariantViolation
from cluster.core.plan import StepPlan, StepResult
from cluster.sim.shadow import ShadowExecutor


class LaggingStep:
    """Done when somebody waits for it."""

    def __init__(self, executor: LaggingShadow, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan

    def wait(self) -> StepResult:
        return self._executor.finish(self._plan)


class LaggingShadow(ShadowExecutor):
    """Runs a step when its result is asked for, as late as an executor may: by then the next one
    has been planned and submitted. A plan that the scheduler goes on changing is found as well."""

    pipeline_depth = 2

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.waiting: deque[StepPlan] = deque()
        self.deepest = 0

    def submit(self, plan: StepPlan) -> LaggingStep:  # type: ignore[override]
        self.waiting.append(plan)
        self.deepest = max(self.deepest, len(self.waiting))
        if len(self.waiting) > self.pipeline_depth:
            raise InvariantViolation(f"{len(self.waiting)} steps are under way")
        return LaggingStep(self, plan)

    def finish(self, plan: StepPlan) -> StepResult:
        if self.waiting.popleft() is not plan:
            raise InvariantViolation(f"step {plan.step} is not the oldest under way")
        return super().submit(plan).wait()
