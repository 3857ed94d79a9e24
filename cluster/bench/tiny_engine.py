"""One engine as a process of its own, without Ray: real scheduler, real hop, a tiny real model.

usage: python -m cluster.bench.tiny_engine NAME MODEL_FOLDER NUM_BLOCKS STEP_MS SECRET

Prints its port, then serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
import time

from cluster.core.config import WorkerConfig
from cluster.core.modelinfo import ModelInfo
from cluster.core.plan import StepPlan, StepResult
from cluster.core.policies import PolicyChoice
from cluster.engine.executor import Executor, PendingStep
from cluster.hop.service import EngineOptions, EngineService
from workers.executors import make_executor

BUDGET = 128
SEQUENCES = 64


class AtLeast:
    """Steps that take no less than a given time: those of a larger model, on a machine whose own
    speed wavers. What they compute is real."""

    def __init__(self, executor: Executor, step_s: float) -> None:
        self._executor = executor
        self._step_s = step_s
        self.pipeline_depth = executor.pipeline_depth

    @property
    def info(self) -> ModelInfo:
        return self._executor.info

    def submit(self, plan: StepPlan) -> PendingStep:
        return _Paced(self._executor.submit(plan), time.monotonic() + self._step_s)

    def problem(self) -> str | None:
        return self._executor.problem()

    def close(self) -> None:
        self._executor.close()


class _Paced:
    def __init__(self, step: PendingStep, until_s: float) -> None:
        self._step = step
        self._until_s = until_s

    def wait(self) -> StepResult:
        result = self._step.wait()
        time.sleep(max(0.0, self._until_s - time.monotonic()))
        return result


async def serve(name: str, model: str, num_blocks: int, step_s: float, secret: str) -> None:
    worker = WorkerConfig(
        model,
        dtype="float32",
        device="cpu",
        num_blocks=num_blocks,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQUENCES,
    )
    options = EngineOptions(
        engine_id=name,
        secret=secret,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQUENCES,
        # As vLLM admits: what an engine expects to need later plays no part.
        policies=PolicyChoice(reservation="on-demand"),
    )
    service = EngineService(AtLeast(make_executor(worker), step_s), options)
    print(await service.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await service.stop("the benchmark is over")


if __name__ == "__main__":
    name, model, num_blocks, step_ms, secret = sys.argv[1:]
    asyncio.run(serve(name, model, int(num_blocks), float(step_ms) / 1e3, secret))
