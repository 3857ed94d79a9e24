"""When requests arrive and how long they are: arrival processes by a short text.

    poisson:RATE            gamma:RATE:CV           constant:RATE
    steps:RATExSECONDS,...  trace:NAME-OR-FILE      closed:USERS

RATE is requests per second, CV the coefficient of variation of the gaps (2 comes in bursts).
`closed` is there for comparison only: users who wait for their answer hide the queue they cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from cluster.core.errors import ConfigError
from cluster.sim.traces import TraceOptions, find_trace, read_trace
from cluster.sim.workload import Lengths, SimRequest, Synthetic, mulberry32


@dataclass(frozen=True, slots=True)
class Renewal:
    """Independent gaps at `rate`; burstiness as in Synthetic: 1 Poisson, 0 constant."""

    rate: float
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Poisson at one rate after the other: (requests per second, seconds)."""

    levels: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded trace, by its shipped name or path; it brings its own lengths."""

    trace: str


@dataclass(frozen=True, slots=True)
class Closed:
    """So many users, each of whom sends again when the answer is complete."""

    users: int


Arrivals: TypeAlias = Renewal | Steps | Replay | Closed


@dataclass(frozen=True, slots=True)
class Sizes:
    """requests: at most so many. Lengths in tokens; trace: scale and caps for replayed lengths."""

    requests: int
    prompt: Lengths
    output: Lengths
    trace: TraceOptions
    seed: int = 0


def parse_arrivals(text: str) -> Arrivals:
    """Raises ConfigError saying what was expected."""
    kind, _, rest = text.strip().partition(":")
    try:
        if kind == "poisson":
            return Renewal(_rate(rest))
        if kind == "constant":
            return Renewal(_rate(rest), 0.0)
        if kind == "gamma":
            rate, _, cv = rest.partition(":")
            return Renewal(_rate(rate), float(cv))
        if kind == "steps":
            return Steps(tuple(_level(part) for part in rest.split(",")))
        if kind == "trace" and rest:
            return Replay(rest)
        if kind == "closed" and int(rest) > 0:
            return Closed(int(rest))
    except ValueError:
        pass
    raise ConfigError(
        f"arrivals {text!r}: not one of poisson:RATE, gamma:RATE:CV, constant:RATE, "
        "steps:RATExSECONDS,..., trace:NAME, closed:USERS"
    )


def _rate(text: str) -> float:
    rate = float(text)
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError
    return rate


def _level(text: str) -> tuple[float, float]:
    rate, _, seconds = text.partition("x")
    return _rate(rate), _rate(seconds)


def timed_requests(arrivals: Arrivals, sizes: Sizes) -> list[SimRequest]:
    """In order of arrival; of a closed loop all at 0 s. The same for the same seed everywhere."""
    if isinstance(arrivals, Replay):
        trace = read_trace(find_trace(arrivals.trace), replace(sizes.trace, limit=sizes.requests))
        return trace.requests
    if isinstance(arrivals, Steps):
        return list(islice(_stepped(arrivals, sizes), sizes.requests))
    if isinstance(arrivals, Closed):
        drawn = Synthetic(sizes.requests, 1.0, sizes.prompt, sizes.output, seed=sizes.seed)
        return [request._replace(arrival_s=0.0) for request in drawn]
    return list(
        Synthetic(
            sizes.requests,
            arrivals.rate,
            sizes.prompt,
            sizes.output,
            arrivals.burstiness,
            sizes.seed,
        )
    )


def _stepped(steps: Steps, sizes: Sizes) -> Iterator[SimRequest]:
    uniform = mulberry32(sizes.seed)
    start = 0.0
    for rate, seconds in steps.levels:
        at = start - math.log(1.0 - uniform()) / rate
        while at < start + seconds:
            prompt = sizes.prompt.draw(uniform)
            yield SimRequest(at, prompt, sizes.output.draw(uniform))
            at -= math.log(1.0 - uniform()) / rate
        start += seconds
