"""Ways to do the same, in turns: on a shared machine only ratios of one run mean anything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way against another over the same rounds.

    best: of each way, in `unit`. ratio: first way over second, of the best; median_ratio: of the
    rounds' ratios. target: what the ratio should be at most, 0 for none.
    """

    case: str
    dtype: str
    ways: tuple[str, str]
    best: tuple[float, float]
    ratio: float
    median_ratio: float
    target: float
    unit: str = "us"


def compare(
    case: str,
    dtype: str,
    times: dict[str, list[float]],
    ways: tuple[str, str],
    target: float,
    unit: str = "us",
) -> Comparison:
    """times: way -> a figure per round."""
    first, second = times[ways[0]], times[ways[1]]
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return Comparison(
        case,
        dtype,
        ways,
        (min(first), min(second)),
        min(first) / min(second),
        statistics.median(ratios),
        target,
        unit,
    )


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of every way in every round; a first round is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            spent = microseconds(run)
            if turn:
                times[name].append(spent)
    return times


def microseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e6


def reader(num_bytes: int) -> Callable[[], object]:
    """Read memory of this size once, at whatever speed torch's threads do it."""
    memory = torch.ones(num_bytes // 4)
    return memory.sum
