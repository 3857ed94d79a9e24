"""Who asks when for how much: synthetic arrivals, the same for the same seed on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from cluster.core.errors import ConfigError

Uniform: TypeAlias = Callable[[], float]
"""Draws from [0, 1)."""

_MASK32 = 0xFFFFFFFF


class SimRequest(NamedTuple):
    """arrival_s: since the start. Lengths in tokens, >= 1. hash_ids: one per 512 tokens of the
    prompt, equal ids for an equal prefix; empty when nothing is known of the content. tenant,
    priority: as in EngineRequest."""

    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value!r}")


def mulberry32(seed: int) -> Uniform:
    """A 32-bit generator (Tommy Ettinger, public domain); the articles' workload is drawn by it."""
    state = seed & _MASK32

    def draw() -> float:
        nonlocal state
        state = (state + 0x6D2B79F5) & _MASK32
        mixed = ((state ^ (state >> 15)) * (state | 1)) & _MASK32
        mixed ^= (mixed + (((mixed ^ (mixed >> 7)) * (mixed | 61)) & _MASK32)) & _MASK32
        return (mixed ^ (mixed >> 14)) / 4294967296.0

    return draw


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal token counts with that mean; cv (deviation over mean) 0 makes them all equal."""

    mean: float
    cv: float = 0.6

    def __post_init__(self) -> None:
        _require_range("mean length", self.mean, 1.0, 1e7)
        _require_range("length cv", self.cv, 0.0, 10.0)

    def draw(self, uniform: Uniform) -> int:
        """Rounded half up, at least 1. Two uniforms, of which Box-Muller's sine is not used."""
        if self.cv == 0:
            return max(1, math.floor(self.mean + 0.5))
        variance = math.log(1.0 + self.cv * self.cv)
        first, second = max(uniform(), 1e-12), uniform()
        normal = math.sqrt(-2.0 * math.log(first)) * math.cos(2.0 * math.pi * second)
        length = math.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * normal)
        return max(1, math.floor(length + 0.5))


@dataclass(frozen=True, slots=True)
class Synthetic:
    """`requests` arrivals at `rate` per second on average.

    burstiness: coefficient of variation of the gaps. 1 is Poisson, 0 a metronome, more than 1
    comes in bursts (gamma-distributed gaps).
    """

    requests: int
    rate: float
    prompt: Lengths
    output: Lengths
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require_range("requests", self.requests, 1, 1e9)
        _require_range("rate", self.rate, 1e-6, 1e6)
        _require_range("burstiness", self.burstiness, 0.0, 100.0)

    def __iter__(self) -> Iterator[SimRequest]:
        """Drawn as it is read: a million requests take no memory. Order of the draws per
        request: gap, prompt, output."""
        uniform = mulberry32(self.seed)
        gap = self._gaps(uniform)
        arrival_s = 0.0
        for _ in range(self.requests):
            arrival_s += gap()
            prompt = self.prompt.draw(uniform)
            yield SimRequest(arrival_s, prompt, self.output.draw(uniform))

    def _gaps(self, uniform: Uniform) -> Callable[[], float]:
        rate = self.rate
        if self.burstiness == 1.0:
            return lambda: -math.log(1.0 - uniform()) / rate
        if self.burstiness == 0.0:
            return lambda: 1.0 / rate
        shape = self.burstiness**-2
        # A generator of its own, so that the lengths stay those of the other arrival processes.
        gamma = random.Random(self.seed)
        return lambda: gamma.gammavariate(shape, 1.0 / (shape * rate))


ARTICLE = Synthetic(160, 6.0, Lengths(1024), Lengths(128), seed=11)
"""The workload behind the table of "Batching: static, dynamic, continuous and chunked prefill"."""


def article_workload(seed: int = 11) -> Synthetic:
    return replace(ARTICLE, seed=seed)
