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

    Implemented by workers.executor.LocalExecutor and sim.shadow.ShadowExecutor; both pass the
    same contract suite. Not thread-safe: the engine loop's thread is its only caller.
    """

    @property
    def info(self) -> ModelInfo: ...

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. Rows refer to sequences admitted in this or an earlier plan."""

    def close(self) -> None:
        """Free the model and the cache. Idempotent."""
