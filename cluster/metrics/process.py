"""Of the process itself, under the names that dashboards know."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cluster.metrics.family import Family, Kind, Lines

FAMILIES = (
    Family(
        "process_cpu_seconds_total",
        Kind.COUNTER,
        "seconds",
        "CPU time of the process, user and system.",
    ),
    Family("process_resident_memory_bytes", Kind.GAUGE, "bytes", "Memory of the process in RAM."),
    Family(
        "process_start_time_seconds", Kind.GAUGE, "Unix seconds", "When the process was started."
    ),
)
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessLines:
    def __init__(self) -> None:
        self._lines = [Lines(family) for family in FAMILIES]
        self._started = _start_time()

    def text(self) -> str:
        times = os.times()
        values = (times.user + times.system, _resident_bytes(), self._started)
        return "".join(
            [lines.numbers([value]) for lines, value in zip(self._lines, values, strict=True)]
        )


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _start_time() -> float:
    """From the kernel where there is one that says so, else this moment."""
    try:
        after_name = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks = int(after_name[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text("ascii").splitlines()
            if line.startswith("btime")
        )
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError, StopIteration):
        return time.time()
