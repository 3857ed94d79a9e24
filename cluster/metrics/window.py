"""Tails of the last minute, out of histograms that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from cluster.metrics.histogram import Histogram, quantile

TICK_S = 5.0
WINDOW_S = 60.0


class Tail(NamedTuple):
    """Seconds; None without an observation. name: "ttft", "tpot", "itl" or "gap" (the longest of a
    stream). observations: within the window."""

    name: str
    observations: int
    p50_s: float | None
    p99_s: float | None


class _Mark(NamedTuple):
    at_s: float
    stand: dict[str, list[int]]


class TailWindow:
    """Remembers how the counts stood every TICK_S, for a bit more than WINDOW_S."""

    def __init__(self, histograms: Mapping[str, Histogram]) -> None:
        self._histograms = histograms
        self._marks: deque[_Mark] = deque()

    def tick(self, now: float) -> None:
        """To be called every TICK_S or so."""
        self._marks.append(_Mark(now, self._stand()))
        while len(self._marks) > 1 and self._marks[1].at_s <= now - WINDOW_S:
            self._marks.popleft()

    def tails(self, now: float) -> list[Tail]:
        """Since the newest mark that is a window old; since the beginning before there is one."""
        old = next((m for m in reversed(self._marks) if m.at_s <= now - WINDOW_S), None)
        stand = self._stand()
        return [
            self._tail(name, counts, None if old is None else old.stand[name])
            for name, counts in stand.items()
        ]

    def _tail(self, name: str, counts: list[int], before: list[int] | None) -> Tail:
        if before is not None:
            counts = [new - old for new, old in zip(counts, before, strict=True)]
        bounds = self._histograms[name].bounds
        return Tail(
            name, sum(counts), quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99)
        )

    def _stand(self) -> dict[str, list[int]]:
        return {name: list(found.counts) for name, found in self._histograms.items()}
