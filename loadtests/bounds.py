"""How sure a percentile of a sample is: order statistics, no assumption about the distribution."""

from __future__ import annotations

import math
from typing import NamedTuple

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A value with the ends of its 95% interval (each end by itself at 97.5%)."""

    value: float
    low: float | None
    high: float | None


def upper_rank(count: int, share: float, confidence: float = CONFIDENCE) -> int | None:
    """Rank (from 1) of the sample that is above the true quantile with that confidence.

    The smallest k with P(Binomial(count, share) < k) >= confidence. None when even the largest
    sample is not: below 299 samples for P99 at 95%.
    """
    if count == 0 or 1.0 - share**count < confidence:
        return None
    return _smallest_rank(count, share, confidence)


def lower_rank(count: int, share: float, confidence: float = CONFIDENCE) -> int | None:
    """Rank of the sample that is below the true quantile with that confidence, or None."""
    mirrored = upper_rank(count, 1.0 - share, confidence)
    return None if mirrored is None else count + 1 - mirrored


def percentile_interval(count: int, share: float) -> tuple[int | None, int | None]:
    """Ranks of the two-sided 95% interval."""
    one_sided = (1.0 + CONFIDENCE) / 2.0
    return lower_rank(count, share, one_sided), upper_rank(count, share, one_sided)


def _smallest_rank(count: int, share: float, confidence: float) -> int:
    """Adds up the binomial from the mean outwards; its far tails cannot move the answer."""
    if count > 100_000:
        deviation = math.sqrt(count * share * (1.0 - share))
        return min(count, math.ceil(count * share + _normal_quantile(confidence) * deviation) + 1)
    log_share, log_rest = math.log(share), math.log1p(-share)
    total = 0.0
    for k in range(count + 1):
        total += math.exp(
            math.lgamma(count + 1)
            - math.lgamma(k + 1)
            - math.lgamma(count - k + 1)
            + k * log_share
            + (count - k) * log_rest
        )
        if total >= confidence:
            return k + 1
    return count


def _normal_quantile(confidence: float) -> float:
    """By bisection of the error function; enough for ranks."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if 0.5 * (1.0 + math.erf(middle / math.sqrt(2.0))) < confidence:
            low = middle
        else:
            high = middle
    return high
