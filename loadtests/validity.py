"""Whether a run may be believed: judged before anybody looks at its latencies."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.collect import Results


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond these the client, not the server, was measured.

    send_lag_ms: P99 of sending after the scheduled arrival. wire_lag_ms: P99 of delivery after
    emission. cpu_share: processor time of one child per second.
    """

    send_lag_ms: float = 20.0
    wire_lag_ms: float = 20.0
    cpu_share: float = 0.8


@dataclass(frozen=True, slots=True)
class Check:
    """One question with its answer and the limit that it was held against."""

    name: str
    value: str
    limit: str
    passed: bool

    def line(self) -> str:
        """For a terminal."""
        mark = "ok    " if self.passed else "FAILED"
        return f"{mark} {self.name}: {self.value} (limit {self.limit})"


def validity_checks(results: Results, limits: Limits, *, closed_loop: bool = False) -> list[Check]:
    """All checks, passed or not; a run is valid when all passed.

    closed_loop: every request is sent as soon as it is its turn, so there is no send lag to judge.
    """
    counts = results.counts
    checks = [
        Check(
            "sent = scheduled",
            f"{counts.sent}",
            f"{counts.scheduled}",
            counts.sent == counts.scheduled > 0,
        ),
        Check(
            "children heard to the end",
            f"{len(results.children)}",
            f"{results.expected_children}",
            len(results.children) == results.expected_children > 0,
        ),
        Check(
            "every request accounted for",
            f"{len(results.records)}",
            f"{counts.scheduled}",
            len(results.records) == counts.scheduled,
        ),
        Check(
            "tokens without gap or repeat",
            f"{counts.faults} out of place",
            "0",
            counts.faults == 0,
        ),
        Check("requests measured", f"{counts.measured}", "at least 1", counts.measured > 0),
        _lag_check(results, "wire lag", limits.wire_lag_ms),
        _cpu_check(results, limits.cpu_share),
    ]
    if not closed_loop:
        checks.append(_lag_check(results, "send lag", limits.send_lag_ms))
    return checks


def _lag_check(results: Results, name: str, limit_ms: float) -> Check:
    value = results.histograms[name].percentile_ms(99)
    return Check(f"{name} P99", f"{value:.1f} ms", f"{limit_ms:g} ms", value <= limit_ms)


def _cpu_check(results: Results, limit: float) -> Check:
    highest = max((child.cpu_share for child in results.children), default=1.0)
    return Check("client CPU", f"{100 * highest:.0f}%", f"{100 * limit:.0f}%", highest < limit)
