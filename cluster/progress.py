"""Progress for a person at a terminal or in a log: few lines, each with the seconds so far."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP = 0.25
"""A stage says something at its start, each time another quarter is done, and at its end."""


class Timeline:
    """Writes lines with the seconds since it was made."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._started_s = time.monotonic()

    def __call__(self, line: str) -> None:
        self._write(f"[{time.monotonic() - self._started_s:5.1f}s] {line}")


class StageLines:
    """Turns (stage, share) reports, however many, into few lines. One per source of reports."""

    def __init__(self, say: Callable[[str], None], prefix: str = "") -> None:
        self._say = say
        self._prefix = prefix
        self._stage = ""
        self._said = 0.0

    def __call__(self, stage: str, share: float) -> None:
        """share: 0 to 1 of the stage."""
        announced = stage == self._stage
        finished = share >= 1.0 > self._said
        if announced and share - self._said < STEP and not finished:
            return
        self._stage, self._said = stage, share
        if share >= 1.0:
            # A stage that is over when it is first heard of has its name for a line.
            ending = " done" if announced else ""
        else:
            ending = f" {share:4.0%}" if share > 0.0 else ""
        self._say(f"{self._prefix}{stage}{ending}")
