"""Percentiles of any number of samples in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

EXACT_SAMPLES = 1 << 17
"""Different samples that are kept as they are."""
BUCKETS_PER_E = 4096
"""Buckets per factor e after that: a value is then known to one part in 8,192."""


class Distribution:
    """Samples >= 0 with counts. Exact up to EXACT_SAMPLES calls of add(), then log buckets."""

    __slots__ = ("_buckets", "_counts", "_values", "_zeros", "count", "max", "min", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self.min = math.inf
        self._values: list[float] = []
        self._counts: list[int] = []
        self._buckets: Counter[int] = Counter()
        self._zeros = 0

    def add(self, value: float, count: int = 1) -> None:
        """One value, seen `count` times."""
        self.count += count
        self.total += value * count
        if value > self.max:
            self.max = value
        if value < self.min:
            self.min = value
        self._values.append(value)
        self._counts.append(count)
        if len(self._values) >= EXACT_SAMPLES:
            self._spill()

    def add_all(self, values: list[float], count: int) -> None:
        """Each of the values `count` times."""
        if not values:
            return
        self.count += count * len(values)
        self.total += sum(values) * count
        self.max = max(self.max, *values)
        self.min = min(self.min, *values)
        self._values += values
        self._counts += [count] * len(values)
        if len(self._values) >= EXACT_SAMPLES:
            self._spill()

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, q: float) -> float:
        """Linear between the order statistics around q / 100 * (count - 1); 0 without samples."""
        return self.percentiles((q,))[0]

    def percentiles(self, qs: tuple[float, ...]) -> list[float]:
        """In one pass; qs must rise."""
        if not self.count:
            return [0.0] * len(qs)
        ordered = self._sorted()
        found: list[float] = []
        place, seen = 0, ordered[0][1]
        for q in qs:
            position = q / 100.0 * (self.count - 1)
            low = math.floor(position)
            while seen <= low:
                place += 1
                seen += ordered[place][1]
            value = ordered[place][0]
            following = value if seen > low + 1 or seen == self.count else ordered[place + 1][0]
            found.append(value + (following - value) * (position - low))
        return found

    def histogram(self, bins: int) -> list[tuple[float, int]]:
        """(upper edge, count) of equally wide log bins between min and max."""
        if not self.count:
            return []
        low = max(self.min, 1e-6)
        ratio = max(self.max / low, 1.0 + 1e-9)
        counts = [0] * bins
        for value, count in self._sorted():
            share = math.log(max(value, low) / low) / math.log(ratio)
            counts[min(bins - 1, int(share * bins))] += count
        return [(low * ratio ** ((i + 1) / bins), c) for i, c in enumerate(counts)]

    def _sorted(self) -> list[tuple[float, int]]:
        pairs = list(zip(self._values, self._counts, strict=True))
        pairs += [(math.exp((k + 0.5) / BUCKETS_PER_E), c) for k, c in self._buckets.items()]
        if self._zeros:
            pairs.append((0.0, self._zeros))
        pairs.sort()
        return pairs

    def _spill(self) -> None:
        buckets, log, floor = self._buckets, math.log, math.floor
        for value, count in zip(self._values, self._counts, strict=True):
            if value > 0.0:
                buckets[floor(log(value) * BUCKETS_PER_E)] += count
            else:
                self._zeros += count
        self._values = []
        self._counts = []
