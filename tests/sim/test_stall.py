"""A long prompt arrives while 64 users decode: what each budget makes of it, at peak figures."""

from __future__ import annotations

import pytest

from cluster.core.plan import StepPlan
from cluster.core.policies import PolicyChoice
from cluster.engine.core import EngineCore, StepReport
from cluster.sim.costs.base import StepCost
from cluster.sim.engine import SimEngine
from cluster.sim.experiment import EngineSetup
from cluster.sim.metrics import Meter, Summary
from cluster.sim.simulation import Simulation
from cluster.sim.workload import SimRequest
from tests.unit.sim.test_costs import PEAK_COST

USERS = 64
CONTEXT = 4096
PROMPT = 32_768
AT_S = 10.0
DECODED = 715
"""Tokens that each user has got when the prompt arrives; then everybody is at CONTEXT."""


class LinearLayersOnly:
    """As the article reckons its budgets: the prompt costs its linear layers, and only the users'
    own caches are read."""

    def seconds(self, plan: StepPlan) -> float:
        work = PEAK_COST.work
        context = sum(row.start + 1 for row in plan.rows if row.count == 1)
        return max(
            work.flops_per_token * plan.num_tokens / PEAK_COST.hardware.flops,
            (work.weight_bytes + work.bytes_per_position * context) / PEAK_COST.hardware.bandwidth,
        )

    def decode_seconds(self, sequences: int, positions: int) -> float:
        raise AssertionError("an observed run takes every step by itself")


class PrefillSteps:
    """Steps that compute some of the long prompt."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def stepped(self, engine: SimEngine, plan: StepPlan, report: StepReport, now: float) -> None:
        if now > AT_S and plan.num_tokens > len(plan.rows):
            self.seconds.append(now - engine.started_s)
            self.tokens.append(plan.num_tokens)


def run(policy: str, budget: int, cost: StepCost) -> tuple[PrefillSteps, Summary]:
    setup = EngineSetup(budget, 128, 487_823, policies=PolicyChoice(batching=policy))
    steps = PrefillSteps()
    users = [SimRequest(0.0, CONTEXT - DECODED, 900)] * USERS
    engine = SimEngine("engine", EngineCore(setup.scheduler()), cost)
    workload = [*users, SimRequest(AT_S, PROMPT, 1)]
    return steps, Simulation([engine], workload, Meter(), observer=steps).run()


@pytest.mark.parametrize(
    ("budget", "step_ms", "count", "prefill_s"),
    [
        (512, 15.05, 74, 1.114),
        (1024, 16.63, 35, 0.582),
        (2048, 33.26, 17, 0.565),
        (4096, 66.5, 9, 0.599),
        (8192, 133.0, 5, 0.665),
    ],
)
def test_budget(budget, step_ms, count, prefill_s):
    steps, _ = run("chunked", budget, LinearLayersOnly())
    assert len(steps.seconds) == count
    assert 1e3 * max(steps.seconds) == pytest.approx(step_ms, rel=0.01)
    assert count * max(steps.seconds) == pytest.approx(prefill_s, rel=0.01)
    assert max(steps.tokens) == budget


def test_prefill_first_stalls_every_user():
    steps, summary = run("continuous", 1 << 20, PEAK_COST)
    assert len(steps.seconds) == 1
    assert steps.seconds[0] == pytest.approx(0.8167, abs=1e-4)
    assert summary.max_gap_ms == pytest.approx(831.8, rel=5e-3)


def test_chunks_of_a_prompt():
    for prompt in (4096, 16_384):
        setup = EngineSetup(512, 1, 487_823)
        engine = SimEngine("engine", EngineCore(setup.scheduler()), LinearLayersOnly())
        steps = PrefillSteps()
        workload = [SimRequest(AT_S, prompt, 1)]
        Simulation([engine], workload, Meter(), observer=steps).run()
        assert len(steps.seconds) == prompt // 512


def test_a_hybrid_step_is_its_chunk_and_its_decodes():
    steps, _ = run("chunked", 512 + USERS, LinearLayersOnly())
    assert steps.tokens[0] == 576
