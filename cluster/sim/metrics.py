"""What users and operators feel of a run: latencies, throughput, objectives met, waste.

TTFT counts from the scheduled arrival. TPOT = (last - first token) / (n - 1), so it hides stalls:
the gaps between tokens (ITL) are pooled over all requests, and the longest one stands by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from cluster.core.errors import ConfigError
from cluster.engine.core import StreamStats, StreamTokens
from cluster.sim.coast import Stretch
from cluster.sim.distribution import Distribution

ITL_SHARE = 0.01
"""Share of a request's own gaps that may be above the ITL objective: its own P99 is held."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds that a request must keep to count for goodput; infinite is none."""

    ttft_s: float = 1.0
    tpot_s: float = 0.025
    itl_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "itl_s"):
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise ConfigError(f"objective {name} must be above 0, got {value!r}")


class RequestRecord:
    """One request's times in seconds. first_s and last_s are -1 before its first token.

    late_gaps: gaps longer than the ITL objective. tokens is known at the end only.
    """

    __slots__ = ("arrival_s", "first_s", "last_s", "late_gaps", "longest_gap_s", "tokens")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.first_s = -1.0
        self.last_s = -1.0
        self.tokens = 0
        self.longest_gap_s = 0.0
        self.late_gaps = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """0 for a single token: it has no gap that could be late."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def meets(self, objectives: Objectives) -> bool:
        return (
            self.ttft_s <= objectives.ttft_s
            and self.tpot_s <= objectives.tpot_s
            and self.late_gaps <= ITL_SHARE * (self.tokens - 1)
        )


@dataclass(slots=True)
class Totals:
    """Sums over the run. met: requests that kept every objective. queue_s: from arrival to the
    first step that worked on a request. end_s: when the last token came out."""

    arrived: int = 0
    refused: int = 0
    failed: int = 0
    finished: int = 0
    met: int = 0
    tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    preempted_requests: int = 0
    moves: int = 0
    queue_s: float = 0.0
    end_s: float = 0.0


class Meter:
    """Takes in arrivals and steps' tokens. Memory: the live requests, plus bounded histograms.

    keep: hold on to the finished records, by stream number (tests and small runs).
    """

    def __init__(self, objectives: Objectives | None = None, *, keep: bool = False) -> None:
        self.objectives = objectives or Objectives()
        self.totals = Totals()
        self.ttft = Distribution()
        self.tpot = Distribution()
        self.itl = Distribution()
        self.stall = Distribution()
        """Seconds from a preemption to the step that went on, summed per preempted request."""
        self.records: dict[int, RequestRecord] = {}
        self._keep = keep
        self._live: dict[int, RequestRecord] = {}

    def arrived(self, stream: int, arrival_s: float) -> None:
        self.totals.arrived += 1
        self._live[stream] = RequestRecord(arrival_s)

    def refused(self, stream: int) -> None:
        self.totals.refused += 1
        del self._live[stream]

    def failed(self, stream: int) -> None:
        self.totals.failed += 1
        del self._live[stream]

    def step(self, tokens: list[StreamTokens], now: float) -> None:
        """The tokens that came out at `now`. Equal gaps of neighbours are counted as one sample."""
        live, itl = self._live, self.itl
        limit = self.objectives.itl_s
        common, repeats = 0.0, 0
        for (_, stream), index, _, finish, stats in tokens:
            record = live[stream]
            last = record.last_s
            record.last_s = now
            if last < 0.0:
                record.first_s = now
                self.ttft.add(now - record.arrival_s)
            else:
                gap = now - last
                if gap > record.longest_gap_s:
                    record.longest_gap_s = gap
                if gap > limit:
                    record.late_gaps += 1
                if gap == common:
                    repeats += 1
                else:
                    if repeats:
                        itl.add(common, repeats)
                    common, repeats = gap, 1
            if finish is not None and stats is not None:
                self._finished(stream, index + 1, stats)
        if repeats:
            itl.add(common, repeats)
        if tokens:
            self.totals.tokens += len(tokens)
            self.totals.end_s = max(self.totals.end_s, now)

    def stretch(self, stretch: Stretch) -> None:
        """The tokens of steps that were taken at once."""
        ends, streams, finished = stretch
        count, limit, last = len(streams), self.objectives.itl_s, ends[-1]
        gaps = [after - before for before, after in pairwise(ends)]
        self.itl.add_all(gaps, count)
        longest = max(gaps, default=0.0)
        late = sum(gap > limit for gap in gaps) if longest > limit else 0
        live, first = self._live, ends[0]
        common, repeats = 0.0, 0
        for stream in streams:
            record = live[stream]
            gap = first - record.last_s
            record.last_s = last
            if gap > limit:
                record.late_gaps += 1
            record.late_gaps += late
            if gap == common:
                repeats += 1
            else:
                if repeats:
                    self.itl.add(common, repeats)
                common, repeats = gap, 1
            if gap > record.longest_gap_s:
                record.longest_gap_s = gap
            if longest > record.longest_gap_s:
                record.longest_gap_s = longest
        if repeats:
            self.itl.add(common, repeats)
        self.totals.tokens += count * len(ends)
        self.totals.end_s = max(self.totals.end_s, last)
        for stream, tokens, stats in finished:
            self._finished(stream, tokens, stats)

    def _finished(self, stream: int, tokens: int, stats: StreamStats) -> None:
        record = self._live.pop(stream)
        record.tokens = tokens
        totals = self.totals
        totals.finished += 1
        totals.met += record.meets(self.objectives)
        totals.preemptions += stats.preemptions
        totals.preempted_requests += stats.preemptions > 0
        if stats.preemptions:
            self.stall.add(stats.stalled_s)
        totals.recomputed_tokens += stats.recomputed_tokens
        totals.queue_s += stats.queue_s
        if tokens > 1:
            self.tpot.add(record.tpot_s)
        if self._keep:
            self.records[stream] = record


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run in numbers: milliseconds, tokens per second, percent.

    goodput_rps: requests per second that met every objective. recompute_percent: positions
    computed again, of all positions computed. utilisation_percent: engines' time spent in steps.
    prefix_hit_percent: positions found in the prefix cache, of those found or computed.
    stall: of requests that were preempted, from preemption to the step that went on. moves: of
    requests from engine to engine.
    """

    requests: int
    refused: int
    failed: int
    duration_s: float
    tok_s: float
    requests_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    max_gap_ms: float
    slo_met_percent: float
    goodput_rps: float
    preemptions: int
    recompute_percent: float
    utilisation_percent: float
    steps: int
    queue_mean_ms: float
    prefix_hit_percent: float
    stall_p50_ms: float = 0.0
    stall_max_ms: float = 0.0
    moves: int = 0


@dataclass(slots=True)
class EngineTotals:
    """Sums over the engines of a run. busy_s: seconds inside steps, all engines together."""

    engines: int = 0
    steps: int = 0
    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    busy_s: float = 0.0


def summarise(meter: Meter, engines: EngineTotals) -> Summary:
    """A run that has ended. Shares are of all requests that arrived, refused ones included."""
    totals = meter.totals
    duration_s = totals.end_s
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    ttft = [1e3 * v for v in meter.ttft.percentiles((50, 90, 99))]
    tpot = [1e3 * v for v in meter.tpot.percentiles((50, 99))]
    itl = [1e3 * v for v in meter.itl.percentiles((50, 99))]
    asked = totals.finished + totals.refused + totals.failed
    return Summary(
        requests=totals.finished,
        refused=totals.refused,
        failed=totals.failed,
        duration_s=duration_s,
        tok_s=totals.tokens * per_s,
        requests_s=totals.finished * per_s,
        ttft_p50_ms=ttft[0],
        ttft_p90_ms=ttft[1],
        ttft_p99_ms=ttft[2],
        tpot_p50_ms=tpot[0],
        tpot_p99_ms=tpot[1],
        itl_p50_ms=itl[0],
        itl_p99_ms=itl[1],
        max_gap_ms=1e3 * meter.itl.max,
        slo_met_percent=_percent(totals.met, asked),
        goodput_rps=totals.met * per_s,
        preemptions=totals.preemptions,
        recompute_percent=_percent(totals.recomputed_tokens, engines.computed_tokens),
        utilisation_percent=_percent(engines.busy_s, engines.engines * duration_s),
        steps=engines.steps,
        prefix_hit_percent=_percent(
            engines.prefix_hit_tokens, engines.prefix_hit_tokens + engines.computed_tokens
        ),
        queue_mean_ms=1e3 * totals.queue_s / totals.finished if totals.finished else 0.0,
        stall_p50_ms=1e3 * meter.stall.percentiles((50,))[0] if totals.preempted_requests else 0.0,
        stall_max_ms=1e3 * meter.stall.max if totals.preempted_requests else 0.0,
        moves=totals.moves,
    )


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Labels with units, and values, as reports show them."""
    s = summary
    return [
        ("requests", f"{s.requests}"),
        ("refused", f"{s.refused}"),
        ("duration s", f"{s.duration_s:.2f}"),
        ("tokens/s", f"{s.tok_s:.1f}"),
        ("TTFT P50 ms", f"{s.ttft_p50_ms:.1f}"),
        ("TTFT P99 ms", f"{s.ttft_p99_ms:.1f}"),
        ("TPOT P99 ms", f"{s.tpot_p99_ms:.2f}"),
        ("ITL P50 ms", f"{s.itl_p50_ms:.2f}"),
        ("ITL P99 ms", f"{s.itl_p99_ms:.2f}"),
        ("longest gap ms", f"{s.max_gap_ms:.1f}"),
        ("objectives met %", f"{s.slo_met_percent:.2f}"),
        ("goodput req/s", f"{s.goodput_rps:.3f}"),
        ("preemptions", f"{s.preemptions}"),
        ("recompute %", f"{s.recompute_percent:.2f}"),
        ("stall P50 ms", f"{s.stall_p50_ms:.1f}"),
        ("moves", f"{s.moves}"),
        ("prefix hits %", f"{s.prefix_hit_percent:.2f}"),
        ("utilisation %", f"{s.utilisation_percent:.1f}"),
        ("steps", f"{s.steps}"),
    ]


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole > 0 else 0.0
