"""The seam between the scheduler's side and the workers' side."""

from __future__ import annotations

from typing import Protocol

from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import StepPlan, StepResult


class PendingStep(Protocol):
    """A step under way."""

    def wait(self) -> StepResult:
        """Block until the step is done. Raises whatever killed the step; the engine then dies,
        since a half-run step leaves the KV cache in an unknown state."""


class Executor(Protocol):
    """Runs steps on a loaded model, in the order in which they are submitted.

    Implemented by workers.executor.LocalExecutor, the groups of workers.parallel.executor and
    sim.shadow.ShadowExecutor; all pass the same contract suite. Not thread-safe, but for
    `problem`: the engine loop's thread is its only caller.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def pipeline_depth(self) -> int:
        """Steps that may be submitted before the first of them is waited for: 1, or 2 where the
        next step can be planned while one runs. Steps take effect in their order; a row whose
        newest token is not known to the scheduler yet finds it at the executor."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. Rows refer to sequences admitted in this or an earlier plan."""

    def problem(self) -> str | None:
        """Why no further step can run, as soon as it is known; None when all is well. Called at
        any time, from any thread, also while a step hangs."""

    def close(self) -> None:
        """Free the model and the cache. Idempotent."""
