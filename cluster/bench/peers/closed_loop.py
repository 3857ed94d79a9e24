"""The workload that every peer gets, and its figures. Standard library only: the scripts beside it
import it by its bare name from whatever environment the peer lives in.

32 prompts of 128 and 512 random tokens in turns, 64 greedy tokens each without an end token, 16 at
a time.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

REQUESTS, AT_A_TIME, OUTPUT = 32, 16, 64
LENGTHS = (128, 512)

Submit = Callable[[int, list[int]], None]
"""(number, prompt) -> None: hand over a request."""
Step = Callable[[], Iterable[tuple[int, int, bool]]]
"""() -> (number, new tokens, finished): let time pass until tokens come."""


def prompts() -> list[list[int]]:
    """Ids that every vocabulary of the models in question has."""
    rng = random.Random(7)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(REQUESTS)]
    return [[rng.randrange(1000, 30_000) for _ in range(length)] for length in lengths]


def measure(submit: Submit, step: Step) -> dict[str, float]:
    """A warm-up with other prompts has gone before."""
    waiting = list(enumerate(prompts()))[::-1]
    submitted: dict[int, float] = {}
    arrivals: dict[int, list[float]] = {}
    live = 0
    busy, started = _cpu_seconds(), time.perf_counter()
    while waiting or live:
        while waiting and live < AT_A_TIME:
            number, prompt = waiting.pop()
            submitted[number] = time.perf_counter()
            arrivals[number] = []
            submit(number, prompt)
            live += 1
        for number, count, finished in step():
            arrivals[number] += [time.perf_counter()] * count
            live -= finished
    wall = time.perf_counter() - started
    return figures(submitted, arrivals, wall, _cpu_seconds() - busy)


def figures(
    submitted: dict[int, float], arrivals: dict[int, list[float]], wall: float, cpu: float
) -> dict[str, float]:
    """Seconds in; tokens per second and milliseconds out. cpu: seconds of the process, 0 if nobody
    knows."""
    first = [times[0] - submitted[number] for number, times in arrivals.items()]
    gaps = [b - a for times in arrivals.values() for a, b in pairwise(times)]
    tokens = sum(len(times) for times in arrivals.values())
    if tokens != REQUESTS * OUTPUT:
        raise RuntimeError(f"{tokens} tokens came, not {REQUESTS * OUTPUT}")
    return {
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu if cpu else 0.0,
        "ttft_p50_ms": 1e3 * quantile(first, 0.5),
        "itl_p50_ms": 1e3 * quantile(gaps, 0.5),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
    }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def report(found: dict[str, float]) -> None:
    print(json.dumps(found), flush=True)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
