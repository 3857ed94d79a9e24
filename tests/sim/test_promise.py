"""The learning budget against fixed ones; `headway bench promise` runs the whole traces."""

from __future__ import annotations

import pytest

from cluster.sim.promise import OBJECTIVE_MS, PromiseCase, judge

AROUND_THE_BEST = (512, 576, 640)


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (PromiseCase("azure-conv", 2), 1500),
        (PromiseCase("azure-conv", 3), 1500),
        (PromiseCase("azure-code", 1), 1500),
    ],
    ids=str,
)
def test_the_objective_is_held_at_no_cost(case, limit):
    verdict = judge(case, limit, AROUND_THE_BEST)
    learned, best = verdict.learned.summary, verdict.best_fixed
    assert learned.itl_p99_ms <= OBJECTIVE_MS * 1.05
    assert best is not None
    assert verdict.kept, (learned, best)


def test_a_budget_that_is_too_large_breaks_the_objective():
    """The experiment can tell: an unlimited step does not pass."""
    verdict = judge(PromiseCase("azure-conv", 2), 500, (4096,))
    assert verdict.best_fixed is None
