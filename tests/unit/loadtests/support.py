"""Made-up results of a run."""

from __future__ import annotations

from loadtests.collect import ChildEnd, ChildFacts, Results
from loadtests.histograms import Histograms
from loadtests.records import Record


def record(index: int = 0, at_s: float = 0.0, gap_ms: float = 10.0, **changes: object) -> Record:
    """Ten tokens at even gaps, the first one after 50 ms, sent 1 ms late."""
    first = at_s + 0.05
    values: dict[str, object] = {
        "index": index,
        "kind": "request",
        "tenant": 0,
        "at_s": at_s,
        "sent_s": at_s + 0.001,
        "first_s": first,
        "last_s": first + 9 * gap_ms / 1e3,
        "done_s": first + 9 * gap_ms / 1e3 + 0.001,
        "prompt_tokens": 20,
        "tokens": 10,
        "expected": 10,
        "messages": 10,
        "gaps_us": [round(gap_ms * 1e3)] * 9,
        "server_first_s": 0.04,
        "server_total_s": 0.13,
        **changes,
    }
    return Record(**values)  # type: ignore[arg-type]


def results(records: list[Record], cpu_share: float = 0.1, wire_lag_ms: float = 0.5) -> Results:
    """A run of one child that sent just these."""
    run = Results()
    run.expect_child(len(records))
    for item in records:
        run.add_record(item)
    extra = Histograms()
    for item in records:
        for _ in range(item.tokens):
            extra["wire lag"].add(1e3 * wire_lag_ms)
    encoded = {"wire lag": extra["wire lag"].encode()}
    run.add_child(ChildEnd(ChildFacts(0, len(records), 1.0, cpu_share, cpu_share), encoded, []))
    return run
