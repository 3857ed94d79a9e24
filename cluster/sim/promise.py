"""Does the learning budget keep its promise? Against every fixed budget, on real traces, on a
machine that loses 30% of its speed half-way.

The objective is P99 of the gap between two tokens. Among the fixed budgets that hold it, the best
is the one with the most tokens per second, and of equals the one with the smaller median TTFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cluster.core.policies import PolicyChoice
from cluster.sim.engine import Slowdown
from cluster.sim.experiment import EngineSetup, Experiment, Machine
from cluster.sim.metrics import Summary
from cluster.sim.traces import TraceOptions, find_trace, read_trace

OBJECTIVE_MS = 25.0
TOLERANCE = 1.05
SPEED_LEFT = 0.7
FIXED = (256, 384, 448, 512, 544, 576, 608, 640, 768, 1024)
MAX_TOKENS = 8192
KV_TOKENS = 488_000
MAX_NUM_SEQS = 256


class PromiseCase(NamedTuple):
    trace: str
    rate_scale: float


CASES = (
    PromiseCase("azure-conv", 1),
    PromiseCase("azure-conv", 2),
    PromiseCase("azure-conv", 3),
    PromiseCase("azure-code", 1),
)


class Outcome(NamedTuple):
    """budget: tokens, or "itl" for the learning one."""

    budget: str
    summary: Summary

    @property
    def holds(self) -> bool:
        return self.summary.itl_p99_ms <= OBJECTIVE_MS * TOLERANCE


class Verdict(NamedTuple):
    case: PromiseCase
    learned: Outcome
    fixed: list[Outcome]

    @property
    def best_fixed(self) -> Outcome | None:
        """None if no fixed budget holds the objective."""
        holding = [outcome for outcome in self.fixed if outcome.holds]
        if not holding:
            return None
        most = max(outcome.summary.tok_s for outcome in holding)
        equal = [o for o in holding if o.summary.tok_s >= most * 0.999]
        return min(equal, key=lambda o: o.summary.ttft_p50_ms)

    @property
    def kept(self) -> bool:
        """The objective is held, with no fewer tokens and no later first token (to 0.1% and 1%,
        the resolution of the histograms) than the best fixed budget gives."""
        best, ours = self.best_fixed, self.learned.summary
        if not self.learned.holds:
            return False
        return best is None or (
            ours.tok_s >= best.summary.tok_s * 0.999
            and ours.ttft_p50_ms <= best.summary.ttft_p50_ms * 1.01
        )


def judge(
    case: PromiseCase,
    limit: int | None = None,
    budgets: tuple[int, ...] = FIXED,
    say: Callable[[Outcome], None] = lambda outcome: None,
) -> Verdict:
    """Run the learning budget and the fixed ones over the first `limit` requests of a trace."""
    learned = Outcome("itl", _run(case, "itl", MAX_TOKENS, limit))
    say(learned)
    fixed = []
    for budget in budgets:
        fixed.append(Outcome(str(budget), _run(case, "fixed", budget, limit)))
        say(fixed[-1])
    return Verdict(case, learned, fixed)


def judge_all(
    limit: int | None = None, say: Callable[[Outcome], None] = lambda outcome: None
) -> Iterator[Verdict]:
    for case in CASES:
        yield judge(case, limit, say=say)


def _run(case: PromiseCase, kind: str, budget: int, limit: int | None) -> Summary:
    machine = Machine.named("h100", "llama-3-8b")
    options = TraceOptions(rate_scale=case.rate_scale, limit=limit)
    trace = read_trace(find_trace(case.trace), options)
    setup = EngineSetup(
        budget=budget,
        max_num_seqs=MAX_NUM_SEQS,
        kv_tokens=KV_TOKENS,
        policies=PolicyChoice(budget=kind, itl_objective_s=OBJECTIVE_MS / 1e3),
    )
    slowdown = Slowdown(at_s=trace.requests[-1].arrival_s / 2, factor=1 / SPEED_LEFT)
    return Experiment(setup, machine.cost(), trace, slowdown=slowdown).run()
