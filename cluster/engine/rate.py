"""Tokens per second over a sliding window."""

from __future__ import annotations

from collections import deque


class RateMeter:
    """Events per second over the last `window_s` seconds, in O(1) amortised per call."""

    def __init__(self, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, now: float, count: int) -> None:
        if count:
            self._events.append((now, count))
            self._sum += count
        self._expire(now)

    def per_second(self, now: float) -> float:
        self._expire(now)
        return self._sum / self._window_s

    def _expire(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - self._window_s:
            self._sum -= self._events.popleft()[1]
