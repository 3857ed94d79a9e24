"""An executor that costs nothing: for what everything around the model costs."""

from __future__ import annotations

import time

from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import StepPlan, StepResult

TOKEN = 284
"""Text in every vocabulary."""


class EchoExecutor:
    """Says the same token always, one step per `step_s`. thread_s: CPU time of the thread that
    steps it, as of the newest step."""

    pipeline_depth = 1

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.thread_s = 0.0
        self.info = ModelInfo(
            name="echo",
            architecture="Echo",
            fingerprint="echo",
            dtype="int",
            device="cpu",
            vocab_size=1 << 15,
            max_model_len=4096,
            num_blocks=4096,
            block_size=16,
            kv_bytes_per_token=0,
            weight_bytes=0,
        )

    def submit(self, plan: StepPlan) -> EchoStep:
        self.thread_s = time.thread_time()
        samples = sum(row.samples for row in plan.rows)
        return EchoStep(StepResult(plan.step, [TOKEN] * samples, self.step_s))

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        """Nothing to free."""


class EchoStep:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        time.sleep(self._result.elapsed_s)
        return self._result
