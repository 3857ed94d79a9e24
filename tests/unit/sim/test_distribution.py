"""Percentiles against numpy's definition, exact and in buckets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cluster.sim import distribution
from cluster.sim.distribution import Distribution

QUANTILES = (0, 1, 25, 50, 90, 99, 99.9, 100)


def filled(values, counts=None) -> Distribution:
    found = Distribution()
    for i, value in enumerate(values):
        found.add(value, 1 if counts is None else counts[i])
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000])
def test_percentiles_are_linear(n):
    rng = random.Random(n)
    values = [rng.expovariate(10) for _ in range(n)]
    assert filled(values).percentiles(QUANTILES) == pytest.approx(np.percentile(values, QUANTILES))


def test_counts_repeat_a_sample():
    rng = random.Random(1)
    values = [rng.random() for _ in range(50)]
    counts = [rng.randrange(1, 9) for _ in values]
    found = filled(values, counts)
    pooled = np.repeat(values, counts)
    assert found.percentiles(QUANTILES) == pytest.approx(np.percentile(pooled, QUANTILES))
    assert found.count == len(pooled)
    assert found.mean == pytest.approx(pooled.mean())


def test_many_at_once_are_the_same():
    one, other = Distribution(), filled([0.5, 0.25, 2.0], [3, 3, 3])
    one.add_all([0.5, 0.25, 2.0], 3)
    one.add_all([], 5)
    assert one.percentiles(QUANTILES) == other.percentiles(QUANTILES)
    assert (one.count, one.min, one.max) == (9, 0.25, 2.0)
    assert one.mean == pytest.approx(other.mean)


def test_buckets_keep_one_part_in_four_thousand(monkeypatch):
    monkeypatch.setattr(distribution, "EXACT_SAMPLES", 100)
    rng = random.Random(3)
    values = [rng.lognormvariate(-4, 2) for _ in range(5000)] + [0.0] * 7
    found = filled(values)
    assert len(found._values) < 100
    expected = np.percentile(values, QUANTILES)
    assert found.percentiles(QUANTILES) == pytest.approx(expected, rel=1 / 4000, abs=1e-12)
    assert found.max == max(values)


def test_no_samples():
    empty = Distribution()
    assert empty.percentile(99) == 0.0
    assert empty.mean == 0.0
