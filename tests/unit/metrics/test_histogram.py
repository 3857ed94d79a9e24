from __future__ import annotations

import bisect
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.metrics.histogram import SECONDS, Histogram, quantile


def test_bounds_tell_a_millisecond_where_the_tails_are():
    steps = [b - a for a, b in zip((0.0, *SECONDS), SECONDS, strict=False)]
    assert all(step > 0 for step in steps)
    assert all(
        step == pytest.approx(0.001)
        for step, bound in zip(steps, SECONDS, strict=True)
        if bound <= 0.040
    )
    # Beyond that nothing is off by more than an eighth up to 100 ms, and by a half up to 5 s.
    assert all(
        step <= bound / 8
        for step, bound in zip(steps, SECONDS, strict=True)
        if 0.040 < bound <= 0.100
    )
    assert all(
        step <= bound / 2
        for step, bound in zip(steps, SECONDS, strict=True)
        if 0.040 < bound <= 5.0
    )
    assert len(SECONDS) <= 80


@pytest.mark.parametrize("bound", [0.001, 0.040, 0.045, 60.0])
def test_a_value_at_a_bound_is_below_it(bound: float):
    found = Histogram()
    found.observe(bound)
    found.observe(bound + 1e-9)
    at = SECONDS.index(bound)
    assert found.counts[at : at + 2] == [1, 1]


@given(st.lists(st.floats(0.0, 100.0), max_size=200))
def test_counts_are_those_of_the_values(values: list[float]):
    found = Histogram()
    for value in values:
        found.observe(value)
    assert found.count == len(values)
    assert found.total == pytest.approx(sum(values))
    ordered = sorted(values)
    for at, bound in enumerate(SECONDS):
        assert sum(found.counts[: at + 1]) == bisect.bisect_right(ordered, bound)


def test_quantiles_are_within_their_bucket():
    chooser = random.Random(7)
    values = sorted(chooser.uniform(0.0, 0.039) for _ in range(1000))
    found = Histogram()
    for value in values:
        found.observe(value)
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        exact = values[min(len(values) - 1, int(share * len(values)))]
        told = quantile(found.bounds, found.counts, share)
        assert told == pytest.approx(exact, abs=0.0011)


def test_no_quantile_of_nothing_and_the_last_bound_beyond_it():
    found = Histogram()
    assert quantile(found.bounds, found.counts, 0.99) is None
    found.observe(1e6)
    assert quantile(found.bounds, found.counts, 0.99) == 60.0
