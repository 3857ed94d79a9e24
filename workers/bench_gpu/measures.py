"""Time and what follows from it. Pure but for the clock."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_WARMUP_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the report.

    group: what was compared with what. value: in `unit`. reference: the same of the card at its
    best, 0 where there is none.
    """

    group: str
    case: str
    value: float
    unit: str
    reference: float = 0.0

    @property
    def share(self) -> float:
        """value / reference, 0 where there is no reference."""
        return self.value / self.reference if self.reference else 0.0


def time_rounds(run: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Seconds of each of `rounds` calls, by the device's clock; a few calls before do not count."""
    for _ in range(_WARMUP_ROUNDS):
        run()
    if device.type == "cuda":
        return _time_on_gpu(run, rounds)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def _time_on_gpu(run: Callable[[], object], rounds: int) -> list[float]:
    # torch gives events no types.
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    marks = [event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def gigabytes_per_second(num_bytes: int, seconds: Sequence[float]) -> float:
    """Of the median round, in 10^9 bytes."""
    return num_bytes / statistics.median(seconds) / 1e9


def teraflops(operations: int, seconds: Sequence[float]) -> float:
    """Of the median round, in 10^12 operations per second."""
    return operations / statistics.median(seconds) / 1e12


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of them do not exceed."""
    if not values:
        raise ValueError("a percentile of nothing")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def causal_pairs(count: int, context: int) -> int:
    """(query, key) pairs of `count` new tokens after `context`: each sees itself and all before."""
    return count * context + count * (count + 1) // 2


def attention_operations(num_heads: int, head_dim: int, pairs: int) -> int:
    """Multiplications and additions of q . k and of weights . v."""
    return 4 * num_heads * head_dim * pairs
