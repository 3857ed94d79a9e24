"""The end of a run: verdict, files, and the words on the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from loadtests.collect import Results
from loadtests.job import Job
from loadtests.objectives import (
    EXIT_INVALID,
    EXIT_MET,
    EXIT_MISSED,
    Objectives,
    exit_code,
    load_objectives,
)
from loadtests.validity import Check, Limits, validity_checks

VERDICTS = {
    EXIT_MET: "valid, objectives met",
    EXIT_MISSED: "valid, objectives missed",
    EXIT_INVALID: "INVALID: the client was measured, not the server",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A judged run. goodput_rps: requests per second that met every objective."""

    job: Job
    results: Results
    slo: str
    objectives: Objectives
    validity: list[Check]
    verdicts: list[Check]

    @property
    def exit_code(self) -> int:
        return exit_code(self.validity, self.verdicts)

    @property
    def verdict(self) -> str:
        return VERDICTS[self.exit_code]

    @property
    def goodput_rps(self) -> float:
        span = self.results.span_s()
        met = sum(not r.warmup and self.objectives.met_by(r) for r in self.results.records)
        return met / span if span else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "slo": self.slo,
            "goodput_rps": self.goodput_rps,
            **self.job.as_json(),
            "validity": [asdict(check) for check in self.validity],
            "objectives": [asdict(check) for check in self.verdicts],
            **self.results.summary(),
        }

    def lines(self) -> list[str]:
        """What a terminal shows."""
        shown = [f"{'':14}{'samples':>9}{'P50':>10}{'P90':>10}{'P99':>10}{'95% <':>10}{'max':>10}"]
        summary = self.results.summary()
        for name, row in summary["latencies_ms"].items():
            bound = "-" if row["p99_bound"] is None else f"{row['p99_bound']:.1f}"
            cells = f"{row['p50']:>10.1f}{row['p90']:>10.1f}{row['p99']:>10.1f}"
            shown.append(f"{name:14}{row['count']:>9}{cells}{bound:>10}{row['max']:>10.1f}")
        shown.append(
            f"{summary['requests_per_s']:.2f} requests/s, {summary['tokens_per_s']:.1f} tokens/s, "
            f"goodput {self.goodput_rps:.2f} requests/s; times in ms"
        )
        shown += [check.line() for check in (*self.validity, *self.verdicts)]
        shown += [f"error {name}: {count}" for name, count in self.results.errors.items()]
        shown.append(VERDICTS[self.exit_code])
        return shown


def judge(job: Job, results: Results, slo: str, limits: Limits | None = None) -> Outcome:
    """Raises ConfigError for an unknown slo."""
    objectives = load_objectives(slo)
    closed = job.scenario.closed_users > 0
    validity = validity_checks(results, limits or Limits(), closed_loop=closed)
    return Outcome(job, results, slo, objectives, validity, objectives.checks(results))
