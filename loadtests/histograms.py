"""HDR histograms of a run: any two of them add up exactly, on whatever machine they were filled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped,import-not-found,unused-ignore]

from loadtests.bounds import Interval, percentile_interval, upper_rank
from loadtests.records import Record

MAX_US = 3_600_000_000
DIGITS = 3
METRICS = (
    "TTFT",
    "TPOT",
    "ITL",
    "longest gap",
    "E2E",
    "queue",
    "send lag",
    "wire lag",
    "ITL emitted",
)
"""All in microseconds. "wire lag": delivery after emission, over the fastest delivery of the same
child (clocks of two machines differ). "ITL emitted": gaps by the server's emit times."""


class Histogram:
    """Microseconds with counts, to three digits."""

    def __init__(self) -> None:
        self._hdr: Any = HdrHistogram(1, MAX_US, DIGITS)

    def add(self, microseconds: float, count: int = 1) -> None:
        self._hdr.record_value(min(MAX_US, max(0, round(microseconds))), count)

    def add_seconds(self, seconds: float) -> None:
        self.add(seconds * 1e6)

    @property
    def count(self) -> int:
        return int(self._hdr.total_count)

    @property
    def mean_ms(self) -> float:
        total = sum(value * count for value, count in self.recorded())
        return total / self.count if self.count else 0.0

    @property
    def max_ms(self) -> float:
        return float(self._hdr.get_max_value()) / 1e3 if self.count else 0.0

    def percentile_ms(self, q: float) -> float:
        return float(self._hdr.get_value_at_percentile(q)) / 1e3 if self.count else 0.0

    def interval_ms(self, q: float) -> Interval:
        """The percentile with its 95% interval; ends that the sample is too small for are None."""
        low, high = percentile_interval(self.count, q / 100.0)
        return Interval(
            self.percentile_ms(q),
            None if low is None else self._at_rank(low),
            None if high is None else self._at_rank(high),
        )

    def bound_ms(self, q: float) -> float | None:
        """What the percentile is below with 95% confidence; None when there are too few samples."""
        rank = upper_rank(self.count, q / 100.0)
        return None if rank is None else self._at_rank(rank)

    def encode(self) -> str:
        return str(self._hdr.encode().decode("ascii"))

    def merge(self, encoded: str) -> None:
        self._hdr.decode_and_add(encoded.encode("ascii"))

    def recorded(self) -> Iterator[tuple[float, int]]:
        """(milliseconds, count) of every bucket that is not empty, ascending; its middle value."""
        hdr = self._hdr
        # The library's own iterator looks at each of 23,000 buckets in Python.
        counts = np.frombuffer(hdr.counts, dtype=np.uint64)
        for index in np.flatnonzero(counts):
            low = hdr.get_value_from_index(int(index))
            high = hdr.get_highest_equivalent_value(low)
            yield (low + high) / 2e3, int(counts[index])

    def _at_rank(self, rank: int) -> float:
        # The library rounds to the nearest rank; a quarter below is the same rank either way.
        return self.percentile_ms(100.0 * (rank - 0.25) / self.count)


class Histograms:
    """One histogram per metric."""

    def __init__(self) -> None:
        self._by_name = {name: Histogram() for name in METRICS}

    def __getitem__(self, name: str) -> Histogram:
        return self._by_name[name]

    def add_record(self, record: Record) -> None:
        """Everything that one request tells; failed ones have no latencies, and a warm-up none."""
        if record.warmup or not record.sent:
            return
        self["send lag"].add_seconds(record.send_lag_s)
        if not record.ok:
            return
        self["TTFT"].add_seconds(record.ttft_s)
        self["E2E"].add_seconds(record.e2e_s)
        if record.tpot_s is not None:
            self["TPOT"].add_seconds(record.tpot_s)
        if record.gaps_us:
            self["longest gap"].add(max(record.gaps_us))
        for gap in record.gaps_us:
            self["ITL"].add(gap)
        if record.queue_s is not None:
            self["queue"].add_seconds(record.queue_s)

    def encode(self) -> dict[str, str]:
        return {name: histogram.encode() for name, histogram in self._by_name.items()}

    def merge(self, encoded: dict[str, str]) -> None:
        for name, text in encoded.items():
            self._by_name[name].merge(text)
