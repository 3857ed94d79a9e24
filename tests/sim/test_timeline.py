"""The worked timeline of the article: 8 requests, 4 slots, time counted in decode steps."""

from __future__ import annotations

import pytest

from cluster.core.policies import PolicyChoice
from cluster.sim.costs.base import PerStep
from cluster.sim.experiment import EngineSetup, Experiment
from cluster.sim.metrics import Meter, Summary
from cluster.sim.workload import SimRequest

LENGTHS = {"A": 30, "B": 120, "C": 45, "D": 200, "E": 60, "F": 15, "G": 90, "H": 150}
SLOTS = 4


def run(policy: str, requests: list[SimRequest]) -> tuple[dict[str, float], Summary, Meter]:
    """When each request ended, in steps. A prefill takes no time: its token is not counted."""
    setup = EngineSetup(
        1 << 16, SLOTS, kv_tokens=1 << 16, watermark=0.0, policies=PolicyChoice(batching=policy)
    )
    meter = Meter(keep=True)
    summary = Experiment(setup, PerStep(1.0, 0.0), requests).run(meter=meter)
    return {n: meter.records[i].last_s for i, n in enumerate(LENGTHS, start=1)}, summary, meter


def prefill_apart() -> list[SimRequest]:
    """One output token more than the timeline counts: the one that the free prefill gives."""
    return [SimRequest(0.0, 2, length + 1) for length in LENGTHS.values()]


def fused() -> list[SimRequest]:
    """A prompt of one token is a decode like any other: no prefill step at all."""
    return [SimRequest(0.0, 1, length) for length in LENGTHS.values()]


def test_static():
    ends, summary, _ = run("static", prefill_apart())
    assert max(ends.values()) == 350
    assert summary.duration_s == 350
    assert sum(LENGTHS.values()) == 710
    assert pytest.approx(0.5071, abs=5e-5) == 710 / (SLOTS * 350)
    batches = [list(LENGTHS)[:SLOTS], list(LENGTHS)[SLOTS:]]
    # A member's answer is handed back when its batch ends.
    back = [max(ends[name] for name in batch) for batch in batches for _ in batch]
    assert sum(back) / len(back) == 275


@pytest.mark.parametrize(
    ("policy", "requests"),
    [("continuous", prefill_apart()), ("chunked", fused()), ("fused", fused())],
)
def test_continuous(policy, requests):
    ends, summary, meter = run(policy, requests)
    assert ends == {
        "A": 30, "B": 120, "C": 45, "D": 200, "E": 90, "F": 60, "G": 150, "H": 240,
    }  # fmt: skip
    assert summary.duration_s == 240
    assert pytest.approx(0.7396, abs=5e-5) == 710 / (SLOTS * 240)
    assert sum(ends.values()) / len(ends) == 116.875
    starts = {name: ends[name] - LENGTHS[name] + 1 for name in "EFGH"}
    assert starts == {"E": 31, "F": 46, "G": 61, "H": 91}
    assert all(record.tokens >= 15 for record in meter.records.values())


def test_in_seconds():
    """At the peak rate of an H100's memory, weights only."""
    step_s = 16.06e9 / 3.35e12
    assert 1e3 * step_s == pytest.approx(4.794, abs=5e-4)
    assert 240 * step_s == pytest.approx(1.15, abs=5e-3)
    assert 350 * step_s == pytest.approx(1.68, abs=5e-3)
