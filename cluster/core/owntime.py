"""Time in which this process itself ran: only then does another's silence count against it."""

from __future__ import annotations


class OwnTime:
    """Read once a tick. A tick that took far longer than asked is one in which this process was
    stopped and nobody could be heard: suspicion is not death."""

    def __init__(self, tick_s: float, now_s: float) -> None:
        """tick_s: between two readings. now_s: on a monotonic clock, as for `passed`."""
        self._most_s = 2 * tick_s
        self._before_s = now_s

    def passed(self, now_s: float) -> float:
        """Seconds since the last reading, two ticks at most."""
        passed_s = min(now_s - self._before_s, self._most_s)
        self._before_s = now_s
        return passed_s
