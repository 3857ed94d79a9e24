"""What a run adds up to: records, histograms and counts of all its children, merged exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from loadtests.histograms import METRICS, Histograms
from loadtests.records import Record


@dataclass(slots=True)
class ChildFacts:
    """What a child says about itself. cpu_share: processor seconds per second, over the whole
    replay; peak_cpu_share: of its busiest two seconds."""

    shard: int
    scheduled: int
    wall_s: float
    cpu_share: float
    peak_cpu_share: float
    skew_s: float = 0.0


@dataclass(slots=True)
class ServerSample:
    """What the server said at_s seconds into the run: one mapping per engine, as GetStatus has
    them (engine_id, running, waiting, blocks_free, blocks_total, step, tokens_per_s,
    preemptions)."""

    at_s: float
    engines: list[dict[str, Any]]


@dataclass(slots=True)
class ChildEnd:
    """A child's last words: facts, histograms that only it could fill, and what the server said."""

    facts: ChildFacts
    histograms: dict[str, str]
    server: list[ServerSample]

    @staticmethod
    def from_json(values: dict[str, Any]) -> ChildEnd:
        return ChildEnd(
            ChildFacts(**values["facts"]),
            values["histograms"],
            [ServerSample(**sample) for sample in values["server"]],
        )


@dataclass(slots=True)
class Counts:
    """Requests and tokens of the whole run, warm-up included."""

    scheduled: int = 0
    sent: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0
    server_tokens: int = 0
    faults: int = 0
    preemptions: int = 0
    replays: int = 0
    measured: int = 0

    def add(self, record: Record) -> None:
        self.sent += record.sent
        self.finished += record.ok
        self.failed += not record.ok
        self.tokens += record.tokens
        self.server_tokens += max(0, record.expected)
        self.faults += record.faults
        self.preemptions += record.preemptions
        self.replays += record.replays
        self.measured += record.ok and not record.warmup


@dataclass(slots=True)
class Results:
    """A run while it comes in, and when it is over."""

    records: list[Record] = field(default_factory=list)
    histograms: Histograms = field(default_factory=Histograms)
    counts: Counts = field(default_factory=Counts)
    children: list[ChildFacts] = field(default_factory=list)
    expected_children: int = 0
    server: list[ServerSample] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def add_record(self, record: Record) -> None:
        self.records.append(record)
        self.histograms.add_record(record)
        self.counts.add(record)
        if record.error:
            self.errors[record.error] = self.errors.get(record.error, 0) + 1

    def expect_child(self, scheduled: int) -> None:
        """A child is ready and is going to send so many requests."""
        self.expected_children += 1
        self.counts.scheduled += scheduled

    def add_child(self, end: ChildEnd) -> None:
        self.children.append(end.facts)
        self.histograms.merge(end.histograms)
        self.server += end.server

    def span_s(self) -> float:
        """From the first measured arrival to the last token."""
        times = [r for r in self.records if r.ok and not r.warmup]
        if not times:
            return 0.0
        return max(r.last_s for r in times) - min(r.at_s for r in times)

    def summary(self) -> dict[str, Any]:
        """Numbers for summary.json; milliseconds."""
        span = self.span_s()
        measured = [r for r in self.records if r.ok and not r.warmup]
        tokens = sum(r.tokens for r in measured)
        latencies = {}
        for name in METRICS:
            histogram = self.histograms[name]
            p99 = histogram.interval_ms(99)
            latencies[name] = {
                "count": histogram.count,
                "mean": histogram.mean_ms,
                "p50": histogram.percentile_ms(50),
                "p90": histogram.percentile_ms(90),
                "p99": p99.value,
                "p99_bound": histogram.bound_ms(99),
                "p99_low": p99.low,
                "p99_high": p99.high,
                "max": histogram.max_ms,
            }
        return {
            "counts": asdict(self.counts),
            "span_s": span,
            "tokens_per_s": tokens / span if span else 0.0,
            "requests_per_s": len(measured) / span if span else 0.0,
            "latencies_ms": latencies,
            "server": server_totals(self.server),
            "children": [asdict(child) for child in self.children],
            "errors": self.errors,
        }


def server_totals(samples: list[ServerSample]) -> dict[str, dict[str, float]]:
    """Per engine: steps and preemptions during the run, and the most that ran, waited and was
    held. Needs two samples."""
    totals: dict[str, dict[str, float]] = {}
    if len(samples) < 2:
        return totals
    first = {e["engine_id"]: e for e in samples[0].engines}
    last = {e["engine_id"]: e for e in samples[-1].engines}
    for name in first.keys() & last.keys():
        seen = [e for sample in samples for e in sample.engines if e["engine_id"] == name]
        totals[name] = {
            "steps": last[name]["step"] - first[name]["step"],
            "preemptions": last[name]["preemptions"] - first[name]["preemptions"],
            "most running": max(e["running"] for e in seen),
            "most waiting": max(e["waiting"] for e in seen),
            "most KV used %": max(
                100.0 * (1 - e["blocks_free"] / max(1, e["blocks_total"])) for e in seen
            ),
        }
    return totals
