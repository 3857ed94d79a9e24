"""Headway's engine without its front: core, scheduler and executor in one process, under the
workload of peers/closed_loop.py.

usage: python -m cluster.bench.engine_alone MODEL_FOLDER DTYPE BUDGET THREADS
"""

from __future__ import annotations

import sys
import time

from cluster.bench.peers.closed_loop import AT_A_TIME, LENGTHS, OUTPUT, measure, report
from cluster.core.config import SchedulerConfig, WorkerConfig, blocks_for
from cluster.core.policies import PolicyChoice, make_scheduler
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from cluster.engine.core import EngineCore, StreamKey
from workers.executors import make_executor

BLOCK_SIZE = 16


class EngineAlone:
    """Streams in by number, tokens out per step."""

    def __init__(self, model: str, dtype: str, budget: int, threads: int) -> None:
        longest = max(LENGTHS) + OUTPUT
        num_blocks = 2 * AT_A_TIME * blocks_for(longest, BLOCK_SIZE)
        self._executor = make_executor(
            WorkerConfig(
                model,
                dtype=dtype,
                device="cpu",
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_num_batched_tokens=budget,
                max_num_seqs=AT_A_TIME,
                max_model_len=2 * longest,
                threads=threads,
            )
        )
        config = SchedulerConfig(budget, AT_A_TIME, BLOCK_SIZE, num_blocks, 2 * longest)
        self._core = EngineCore(make_scheduler(config, PolicyChoice()))

    def submit(self, number: int, prompt: list[int]) -> None:
        sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
        request = EngineRequest(tuple(prompt), sampling)
        refusal = self._core.submit(StreamKey(0, number), request, time.monotonic())
        if refusal is not None:
            raise RuntimeError(refusal.reason)

    def step(self) -> list[tuple[int, int, bool]]:
        """(number, new tokens, finished) of every stream that got some; empty when all is done."""
        plan = self._core.begin_step(time.monotonic())
        if plan is None:
            return []
        result = self._executor.submit(plan).wait()
        found = self._core.complete_step(result, time.monotonic())
        return [(t.key.stream, len(t.token_ids), t.finish is not None) for t in found.tokens]


def main() -> None:
    model, dtype, budget, threads = sys.argv[1:]
    engine = EngineAlone(model, dtype, int(budget), int(threads))
    left = 4
    for number in range(left):
        engine.submit(1000 + number, list(range(1000, 1128)))
    while left:
        left -= sum(finished for _, _, finished in engine.step())
    report(measure(engine.submit, engine.step))


if __name__ == "__main__":
    main()
