"""Objectives by name from slo.toml, and the verdict with its exit code."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError
from loadtests.collect import Results
from loadtests.records import Record
from loadtests.validity import Check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SLO_FILE = Path(__file__).parent / "slo.toml"
EXIT_MET = 0
EXIT_MISSED = 3
EXIT_INVALID = 4


@dataclass(frozen=True, slots=True)
class Objectives:
    """P99 limits in milliseconds and a share of failed requests; infinite is no limit."""

    ttft_p99_ms: float = math.inf
    tpot_p99_ms: float = math.inf
    itl_p99_ms: float = math.inf
    longest_gap_p99_ms: float = math.inf
    e2e_p99_ms: float = math.inf
    error_percent: float = 1.0

    def checks(self, results: Results) -> list[Check]:
        """One check per limit that there is."""
        limits = {
            "TTFT": self.ttft_p99_ms,
            "TPOT": self.tpot_p99_ms,
            "ITL": self.itl_p99_ms,
            "longest gap": self.longest_gap_p99_ms,
            "E2E": self.e2e_p99_ms,
        }
        checks = [
            _limit_check(results, name, limit)
            for name, limit in limits.items()
            if math.isfinite(limit)
        ]
        counts = results.counts
        failed = 100.0 * counts.failed / counts.scheduled if counts.scheduled else 100.0
        checks.append(
            Check(
                "failed requests",
                f"{failed:.2f}%",
                f"{self.error_percent:g}%",
                failed <= self.error_percent,
            )
        )
        return checks

    def met_by(self, record: Record) -> bool:
        """Whether this one request counts for goodput. Its own P99 gap stands for ITL."""
        if not record.ok:
            return False
        gaps = sorted(record.gaps_us)
        late = gaps[max(0, math.ceil(0.99 * len(gaps)) - 1)] if gaps else 0
        return (
            1e3 * record.ttft_s <= self.ttft_p99_ms
            and 1e3 * (record.tpot_s or 0.0) <= self.tpot_p99_ms
            and late / 1e3 <= self.itl_p99_ms
            and (gaps[-1] if gaps else 0) / 1e3 <= self.longest_gap_p99_ms
            and 1e3 * record.e2e_s <= self.e2e_p99_ms
        )


def load_objectives(name: str, path: Path = SLO_FILE) -> Objectives:
    """Raises ConfigError naming what is unknown, with what there is."""
    try:
        sections: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if name not in sections:
        raise ConfigError(f"{path.name} has no objectives {name!r}; it has {', '.join(sections)}")
    values = sections[name]
    known = {f.name for f in fields(Objectives)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path.name} [{name}]: unknown key {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{path.name} [{name}] {key}: must be a number >= 0, got {value!r}")
    return Objectives(**values)


def exit_code(validity: Sequence[Check], objectives: Sequence[Check]) -> int:
    """An invalid run has no verdict: 4. Else 0 when every objective was met, 3 when not."""
    if not all(check.passed for check in validity):
        return EXIT_INVALID
    return EXIT_MET if all(check.passed for check in objectives) else EXIT_MISSED


def _limit_check(results: Results, name: str, limit: float) -> Check:
    """A limit is kept when the P99 is; the bound is shown so that nobody trusts 50 samples."""
    histogram = results.histograms[name]
    value, bound = histogram.percentile_ms(99), histogram.bound_ms(99)
    sure = "too few samples for a 95% bound" if bound is None else f"95% sure below {bound:.1f}"
    kept = histogram.count > 0 and value <= limit
    return Check(f"{name} P99", f"{value:.1f} ms ({sure})", f"{limit:g} ms", kept)
