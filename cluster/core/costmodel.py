"""How long a step takes, learnt while serving from the steps themselves.

A step is bound by arithmetic or by memory traffic, whichever is slower (roofline; Williams et al.,
CACM 2009), so its time is the larger of two linear functions of its size. Each is fitted by
recursive least squares with forgetting (Haykin, Adaptive Filter Theory), and a factor that follows
the newest steps quickly takes up what changes from one second to the next: clock, neighbours.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class StepSize(NamedTuple):
    """tokens: computed in the step. positions: KV positions read, summed over sequences.
    pairs: (query, key) pairs of attention. sequences: rows."""

    tokens: int
    positions: int
    pairs: float
    sequences: int


class LeastSquares:
    """y = w . x, fitted to a stream of (x, y); old samples fade with `forgetting` per sample."""

    def __init__(self, size: int, forgetting: float) -> None:
        self.samples = 0
        self._size = size
        self._forgetting = forgetting
        self._weights = [0.0] * size
        self._covariance = [[1e4 if i == j else 0.0 for j in range(size)] for i in range(size)]

    @property
    def weights(self) -> list[float]:
        return self._weights

    def predict(self, x: list[float]) -> float:
        return sum(w * v for w, v in zip(self._weights, x, strict=True))

    def update(self, x: list[float], y: float) -> None:
        size, covariance = self._size, self._covariance
        gain = [sum(row[j] * x[j] for j in range(size)) for row in covariance]
        scale = self._forgetting + sum(x[i] * gain[i] for i in range(size))
        error = y - self.predict(x)
        for i in range(size):
            self._weights[i] += gain[i] / scale * error
        # While nothing new is seen the covariance must not grow without bound (wind-up).
        trace = sum(covariance[i][i] for i in range(size))
        fade = self._forgetting if trace < 1e5 else 1.0
        for i in range(size):
            for j in range(size):
                covariance[i][j] = (covariance[i][j] - gain[i] * gain[j] / scale) / fade
        self.samples += 1


class StepTimeModel:
    """Predicts seconds per step. Starts knowing nothing: `trusted` says when to believe it."""

    FORGETTING = 0.995
    FOLLOW = 0.4
    """Weight of the newest step in the fast factor."""
    COMPUTE_BOUND = 1.1
    """A step this much slower than memory traffic explains was bound by arithmetic."""
    ENOUGH = 8

    def __init__(self) -> None:
        self._memory = LeastSquares(3, self.FORGETTING)
        self._compute = LeastSquares(4, self.FORGETTING)
        self._factor = 1.0

    @property
    def trusted(self) -> bool:
        return self._compute.samples >= self.ENOUGH

    def predict(self, size: StepSize) -> float:
        return self._factor * self._plain(size)

    def observe(self, size: StepSize, seconds: float, decode_only: bool) -> float:
        """Learn from a step; returns measured / predicted (1.0 while nothing was known)."""
        known = self._plain(size)
        ratio = seconds / (self._factor * known) if known > 0 and self.trusted else 1.0
        if known > 0 and self.trusted:
            self._factor += self.FOLLOW * (seconds / known - self._factor)
        steady = seconds / self._factor
        memory = self._memory.predict(_memory_features(size))
        if decode_only:
            self._memory.update(_memory_features(size), steady)
        elif steady > self.COMPUTE_BOUND * memory:
            self._compute.update(_compute_features(size), steady)
        return ratio

    def largest_chunk(self, decodes: StepSize, start: int, limit_s: float) -> int:
        """Prompt tokens, from position `start` on, that a step can carry beside `decodes` within
        `limit_s`; 0 if not even the decodes are. Predicted time is a + b n + c n^2 in the chunk n.
        """
        limit = limit_s / self._factor
        w, m = self._compute.weights, self._memory.weights
        constant = self._compute.predict(
            _compute_features(decodes._replace(positions=decodes.positions + start))
        )
        linear = w[1] * 1e-3 + w[2] * 1e-6 * (start + 0.5) + w[3] * 1e-5
        by_compute = _largest_root(w[2] * 0.5e-6, linear, constant - limit)
        row = StepSize(0, decodes.positions + start, 0.0, decodes.sequences + 1)
        by_memory = _largest_root(
            0.0, m[1] * 1e-5, self._memory.predict(_memory_features(row)) - limit
        )
        return max(0, int(min(by_compute, by_memory)))

    def _plain(self, size: StepSize) -> float:
        return max(
            self._memory.predict(_memory_features(size)),
            self._compute.predict(_compute_features(size)),
        )


def _memory_features(size: StepSize) -> list[float]:
    return [1.0, size.positions * 1e-5, size.sequences * 1e-2]


def _compute_features(size: StepSize) -> list[float]:
    return [1.0, size.tokens * 1e-3, size.pairs * 1e-6, size.positions * 1e-5]


def _largest_root(square: float, linear: float, constant: float) -> float:
    """The largest n >= 0 with square n^2 + linear n + constant <= 0; -1 if there is none.
    A fit with the wrong sign (time that falls with n) says nothing about a limit: 2^30."""
    if constant > 0.0:
        return -1.0
    if square > 1e-18:
        return (math.sqrt(linear * linear - 4.0 * square * constant) - linear) / (2.0 * square)
    if linear > 1e-18:
        return -constant / linear
    return float(1 << 30)
