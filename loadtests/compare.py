"""Two runs side by side, with the uncertainty that their sample sizes leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.core.errors import ConfigError
from loadtests.records import Record, read_records

Array: TypeAlias = npt.NDArray[np.float64]

RESAMPLES = 400
METRICS: tuple[tuple[str, float], ...] = (
    ("TTFT", 50),
    ("TTFT", 99),
    ("TPOT", 50),
    ("TPOT", 99),
    ("ITL", 50),
    ("ITL", 99),
    ("longest gap", 99),
    ("E2E", 99),
)


@dataclass(frozen=True, slots=True)
class Run:
    """A result folder as it was written."""

    name: str
    summary: dict[str, Any]
    records: list[Record]

    @staticmethod
    def read(folder: Path) -> Run:
        """Raises ConfigError for a folder that holds no run."""
        try:
            summary = json.loads((folder / "summary.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: no result of a load test: {error}") from None
        measured = [r for r in read_records(folder / "requests.jsonl") if r.ok and not r.warmup]
        if not measured:
            raise ConfigError(f"{folder}: no request was measured")
        return Run(folder.name, summary, measured)


@dataclass(frozen=True, slots=True)
class Difference:
    """A percentile of both runs in ms, and the ratio B / A with its 95% interval."""

    name: str
    a: float
    b: float
    ratio: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 1, that is: no difference."""
        return not self.low <= 1.0 <= self.high


def compare(a: Run, b: Run, seed: int = 0) -> list[Difference]:
    """Bootstrap over requests, not over tokens: the gaps of one stream are not independent."""
    draws = np.random.default_rng(seed)
    found = []
    for name, q in METRICS:
        values_a, values_b = _values(name, a.records), _values(name, b.records)
        if not values_a or not values_b:
            continue
        value_a, value_b = _percentile(values_a, q), _percentile(values_b, q)
        resampled = (_resampled(values, q, draws) for values in (values_b, values_a))
        ratios = np.divide(*(np.maximum(sample, 1e-9) for sample in resampled))
        low, high = (float(edge) for edge in np.percentile(ratios, (2.5, 97.5)))
        ratio = value_b / max(value_a, 1e-9)
        found.append(Difference(f"{name} P{q:g}", value_a, value_b, ratio, low, high))
    return found


def _values(name: str, records: list[Record]) -> list[Array]:
    """Per request its values in ms; requests that have none are left out."""
    getters: dict[str, Callable[[Record], list[float]]] = {
        "TTFT": lambda r: [1e3 * r.ttft_s],
        "TPOT": lambda r: [] if r.tpot_s is None else [1e3 * r.tpot_s],
        "ITL": lambda r: [gap / 1e3 for gap in r.gaps_us],
        "longest gap": lambda r: [max(r.gaps_us) / 1e3] if r.gaps_us else [],
        "E2E": lambda r: [1e3 * r.e2e_s],
    }
    found = [np.asarray(getters[name](record), dtype=np.float64) for record in records]
    return [values for values in found if values.size]


def _percentile(values: list[Array], q: float) -> float:
    return float(np.percentile(np.concatenate(values), q))


def _resampled(values: list[Array], q: float, draws: np.random.Generator) -> Array:
    count = len(values)
    picks = draws.integers(0, count, size=(RESAMPLES, count))
    return np.asarray([_percentile([values[k] for k in row], q) for row in picks])


def compare_lines(a: Run, b: Run) -> list[str]:
    """What `headway loadtest compare` prints."""
    shown = []
    for label, run in (("A", a), ("B", b)):
        shown.append(
            f"{label}: {run.name}: {len(run.records)} requests measured, "
            f"{run.summary['tokens_per_s']:.1f} tokens/s, {run.summary['verdict']}"
        )
    if a.summary["scenario"] != b.summary["scenario"]:
        shown.append("the loads differ: what is compared is not only the server")
    return shown + difference_lines(a, b, ("A", "B", "B/A"), width=10)


def difference_lines(a: Run, b: Run, heads: tuple[str, str, str], width: int) -> list[str]:
    """A table with a row per percentile. heads, width: of the columns A, B and their ratio; width
    of the first two."""
    head_a, head_b, head_ratio = heads
    shown = [f"{'ms':16}{head_a:>{width}}{head_b:>{width}}{head_ratio:>8}   95% interval"]
    for row in compare(a, b):
        sure = "" if row.certain else "  (may be chance)"
        shown.append(
            f"{row.name:16}{row.a:>{width}.1f}{row.b:>{width}.1f}{row.ratio:>8.3f}"
            f"   {row.low:.3f} to {row.high:.3f}{sure}"
        )
    return shown
