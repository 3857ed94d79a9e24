"""Real traffic, a part of it: the whole table is `headway simulate --azure` (two minutes)."""

from __future__ import annotations

import pytest

from cluster.sim.azure import GOLDEN, AzureCase, azure_experiment, cells
from cluster.sim.bench import run_bench

QUICK = [
    AzureCase("azure-code", 1, "continuous"),
    AzureCase("azure-conv", 3, "chunked"),
]


@pytest.mark.parametrize("case", QUICK, ids=lambda c: f"{c.trace}-x{c.rate_scale}-{c.policy}")
def test_rows(case):
    assert cells(azure_experiment(case).run()) == pytest.approx(GOLDEN[case], rel=0.1)


def test_the_benchmark_counts_steps():
    result = run_bench(requests=100)
    assert result.steps > 1000
    assert result.rows == pytest.approx(result.tokens / result.steps)
    assert result.steps_per_s > 0
