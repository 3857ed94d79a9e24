from __future__ import annotations

import pytest

from cluster.metrics.histogram import Histogram
from cluster.metrics.window import TICK_S, TailWindow


def window() -> tuple[Histogram, TailWindow]:
    found = Histogram()
    return found, TailWindow({"itl": found})


def test_only_the_last_minute_counts():
    found, tails = window()
    now = 0.0
    # Two minutes of 30 ms, then one of 5 ms.
    for gap, seconds in ((0.0295, 120), (0.0045, 65)):
        for _ in range(int(seconds / TICK_S)):
            tails.tick(now)
            for _ in range(10):
                found.observe(gap)
            now += TICK_S
    (tail,) = tails.tails(now)
    assert tail.p99_s == pytest.approx(0.005, abs=1e-4)
    assert 120 <= tail.observations <= 130


def test_everything_counts_at_first():
    found, tails = window()
    tails.tick(0.0)
    found.observe(0.0105)
    (tail,) = tails.tails(1.0)
    assert (tail.name, tail.observations) == ("itl", 1)
    assert tail.p50_s == pytest.approx(0.0105, abs=1e-3)


def test_nothing_lately():
    found, tails = window()
    found.observe(0.010)
    for at in range(0, 100, 5):
        tails.tick(float(at))
    (tail,) = tails.tails(100.0)
    assert (tail.observations, tail.p99_s) == (0, None)


def test_marks_do_not_pile_up():
    _, tails = window()
    for at in range(0, 10_000, 5):
        tails.tick(float(at))
    assert len(tails._marks) <= 14
