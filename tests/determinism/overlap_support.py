"""An engine in lockstep over a real model, as far ahead as its executor lets it plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cluster.core.config import SchedulerConfig, WorkerConfig
from cluster.core.invariants import check_idle, check_plan, check_scheduler
from cluster.core.outcome import FinishReason
from cluster.core.plan import TokenLogprob
from cluster.core.policies import PolicyChoice, make_scheduler
from cluster.core.request import EngineRequest
from cluster.core.scheduler import Scheduler
from cluster.engine.executor import PendingStep
from workers.executor import LocalExecutor
from workers.graphs import DecodeGraphs

BLOCK = 4


class Lagging(LocalExecutor):
    """Reads a step's ids when the next one has been submitted, as on a GPU."""

    pipeline_depth = 2


class Rerun:
    """Stands in for CUDA graphs: does again what was captured, on the buffers of the capture."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        run()

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def use_graphs(executor: LocalExecutor, max_num_seqs: int) -> Rerun:
    """Run decode steps as graphs from now on."""
    capturer = Rerun()
    runner = executor._shard._runner
    graphs = DecodeGraphs(runner._passes, capturer, max_num_seqs)
    graphs.prepare(runner._inputs)
    runner._passes = graphs
    return capturer


class Served(NamedTuple):
    outputs: list[list[int]]
    finishes: list[FinishReason | None]
    logprobs: list[list[TokenLogprob]]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    scheduler: Scheduler


def open_executor(
    executor_type: type[LocalExecutor], folder: Path, host_blocks: int, **limits: object
) -> LocalExecutor:
    worker = WorkerConfig(
        model=str(folder), dtype="float32", device="cpu", block_size=BLOCK, **limits
    )  # type: ignore[arg-type]
    return executor_type(worker, host_blocks=host_blocks)


def serve(
    executor: LocalExecutor,
    requests: list[EngineRequest],
    choice: PolicyChoice,
    max_num_seqs: int,
    budget: int,
    disturb: Callable[[Scheduler, int], None] = lambda scheduler, step: None,
) -> Served:
    """All requests to their end. disturb: called before every plan, with the steps so far."""
    info = executor.info
    config = SchedulerConfig(budget, max_num_seqs, BLOCK, info.num_blocks, info.max_model_len)
    scheduler = make_scheduler(config, choice)
    numbers = {scheduler.add(r, 0.0).seq_id: i for i, r in enumerate(requests)}
    served = Served(
        [[] for _ in requests], [None] * len(requests), [[] for _ in requests], {}, scheduler
    )
    scheduler.close_arrivals()
    flying: deque[PendingStep] = deque()
    while True:
        while len(flying) < executor.pipeline_depth:
            disturb(scheduler, scheduler.counters.steps)
            plan = scheduler.plan(0.0)
            if plan is None:
                break
            check_plan(plan, scheduler)
            flying.append(executor.submit(plan))
        if not flying:
            break
        committed = scheduler.commit(flying.popleft().wait())
        for seq_id, index, token, finish in committed.outcomes:
            number = numbers[seq_id]
            assert index == len(served.outputs[number])
            served.outputs[number].append(token)
            served.finishes[number] = finish
            if seq_id in committed.logprobs:
                served.logprobs[number].append(committed.logprobs[seq_id])
        for seq_id, entries in committed.prompt_logprobs.items():
            served.prompt_logprobs[numbers[seq_id]] = entries
        assert not committed.failures
        check_scheduler(scheduler)
    check_idle(scheduler)
    executor.close()
    return served
