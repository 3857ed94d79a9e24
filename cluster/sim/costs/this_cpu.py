"""This machine's processor as a roofline: one measurement of arithmetic, one of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from cluster.sim.costs.hardware import THIS_CPU, Hardware

MATRIX = 512
STREAM_BYTES = 1 << 26
REPEATS = 5


def measure() -> Hardware:
    """Peak-like figures of float32 matrix products and of a memory copy, in about 0.2 s.

    The shares are 1, since what is measured is what is reached. Differs from run to run with
    whatever else the machine does.
    """
    a = np.ones((MATRIX, MATRIX), dtype=np.float32)
    product_s = _fastest(lambda: a @ a)
    source = np.ones(STREAM_BYTES // 4, dtype=np.float32)
    target = np.empty_like(source)
    copy_s = _fastest(lambda: np.copyto(target, source))
    return Hardware(
        THIS_CPU,
        flops=2 * MATRIX**3 / product_s,
        bandwidth=2 * STREAM_BYTES / copy_s,
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        link=2 * STREAM_BYTES / copy_s,
        flops_share=1.0,
        bandwidth_share=1.0,
    )


def _fastest(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
