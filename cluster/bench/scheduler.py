"""What the scheduler alone costs per step: no model, no threads, thread CPU time.

The cases are those in which vLLM's scheduler was measured (block 16, budget 2048), so the two
tables can be put side by side.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from cluster.core.config import SchedulerConfig
from cluster.core.plan import StepPlan, StepResult
from cluster.core.policies import PolicyChoice, make_scheduler
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Case:
    """running, waiting: sequences. prompt: tokens each. prefix_cache, num_blocks: as configured.
    arrivals: a newcomer every so many steps, 0 for none (a mix of prefill and decode)."""

    name: str
    running: int
    waiting: int
    prompt: int = 128
    num_blocks: int = 1 << 17
    prefix_cache: str = "off"
    arrivals: int = 0
    newcomer_prompt: int = 1024


CASES = (
    Case("32 running + 128 waiting", 32, 128),
    Case("256 running + 1,024 waiting", 256, 1024),
    Case("256 running + 1,024 waiting, prefix cache", 256, 1024, prefix_cache="on"),
    Case("mix with chunked prefill", 240, 0, arrivals=1),
    Case("pool exhausted", 76, 128, num_blocks=76 * 10, prompt=140),
)
SCALING = tuple(Case(f"{n} running", n, 0, num_blocks=64 * n) for n in (16, 64, 256, 1024, 4096))


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per step: median and 99th percentile of plan() and of commit()."""

    case: Case
    plan_p50: float
    plan_p99: float
    commit_p50: float
    preemptions: int

    @property
    def step_p50(self) -> float:
        return self.plan_p50 + self.commit_p50


def measure(case: Case, steps: int = 400) -> Timing:
    scheduler = _steady(case)
    plans: list[float] = []
    commits: list[float] = []
    before = scheduler.counters.preemptions
    # As the engine loop does when it starts.
    gc.collect()
    gc.freeze()
    for step in range(steps):
        if case.arrivals and step % case.arrivals == 0:
            _arrive(scheduler, case.newcomer_prompt, 1, 3)
        started = time.thread_time_ns()
        plan = scheduler.plan(float(step))
        planned = time.thread_time_ns()
        if plan is None:
            raise RuntimeError(f"{case.name}: nothing to run: {scheduler.wait_cause}")
        result = _result(plan)
        begun = time.thread_time_ns()
        scheduler.commit(result)
        commits.append(time.thread_time_ns() - begun)
        plans.append(planned - started)
    preempted = scheduler.counters.preemptions - before
    return Timing(
        case, _quantile(plans, 0.5), _quantile(plans, 0.99), _quantile(commits, 0.5), preempted
    )


def _steady(case: Case) -> Scheduler:
    """All of `running` decode, `waiting` wait behind them."""
    config = SchedulerConfig(
        max_num_batched_tokens=max(2048, case.running),
        max_num_seqs=case.running + (16 if case.arrivals else 0),
        block_size=16,
        num_blocks=case.num_blocks,
        max_model_len=1 << 16,
        watermark=0.0,
        max_preemptions=1 << 30,
    )
    scheduler = make_scheduler(config, PolicyChoice(prefix_cache=case.prefix_cache))
    _arrive(scheduler, case.prompt, case.running, 1024 - case.prompt)
    for _ in range(10_000):
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        scheduler.commit(_result(plan))
        if plan.num_decodes == len(plan.rows) and not scheduler.queue:
            break
        if scheduler.counters.preemptions:
            break
    _arrive(scheduler, case.prompt, case.waiting, 64)
    return scheduler


def _arrive(scheduler: Scheduler, prompt: int, count: int, max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    base = scheduler.counters.steps
    for number in range(count):
        ids = tuple((base + number * 7 + i) % 30_000 for i in range(prompt))
        scheduler.add(EngineRequest(ids, sampling), 0.0)


def _result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [5] * sum(row.samples for row in plan.rows), 0.01)


def _quantile(nanoseconds: list[float], share: float) -> float:
    ordered = sorted(nanoseconds)
    return ordered[int(share * (len(ordered) - 1))] / 1e3
