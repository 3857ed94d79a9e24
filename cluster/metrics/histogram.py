"""Histograms that cost a bisection per observation, and their quantiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def _milliseconds() -> tuple[float, ...]:
    fine = range(1, 41)
    medium = (45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 100, 120, 140, 160, 180, 200)
    coarse = (250, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000, 60_000)
    return tuple(ms / 1000 for ms in (*fine, *medium, *coarse))


SECONDS = _milliseconds()
"""Upper bounds of every duration: steps of 1 ms up to 40 ms, where the tails of the gap between two
tokens are; 5 ms up to 100, 20 up to 200, then coarse."""


class Histogram:
    """Counts per bucket; the last one is for all above the largest bound.

    One thread observes. Others may read `counts` and `total`: they see each a moment old.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """A value equal to a bound belongs below it, as Prometheus' `le` has it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of the observations lie, linear within its bucket as
    Prometheus' histogram_quantile has it; the largest bound for what is beyond. None without any.
    """
    total = sum(counts)
    if total == 0:
        return None
    rank = share * total
    cumulative = list(accumulate(counts))
    at = bisect_left(cumulative, rank)
    # A rank of 0 finds an empty bucket first.
    while counts[at] == 0:
        at += 1
    if at >= len(bounds):
        return bounds[-1]
    lower = bounds[at - 1] if at else 0.0
    inside = (rank - (cumulative[at] - counts[at])) / counts[at]
    return lower + (bounds[at] - lower) * inside
