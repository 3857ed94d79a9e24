"""One HTML file per run that needs nothing else; tables and plots are those of the simulator."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError
from cluster.sim.distribution import Distribution
from cluster.sim.html import SERIES, cumulative, line, page
from loadtests.outcome import Outcome
from loadtests.records import Record, write_records
from loadtests.validity import Check

BINS = 60


def result_folder(path: str | Path) -> Path:
    """The folder, made if need be. To be called before a load: after it, results would be lost.

    Raises ConfigError where nothing can be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out {folder}: no results can be written there: {error}") from None
    return folder


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """summary.json, requests.jsonl and report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(outcome.as_json(), indent=1), "utf-8")
    records = sorted(outcome.results.records, key=lambda record: record.index)
    write_records(folder / "requests.jsonl", records)
    (folder / "report.html").write_text(report_html(outcome), "utf-8")


def report_html(outcome: Outcome) -> str:
    results, summary = outcome.results, outcome.results.summary()
    measured = [r for r in results.records if r.ok and not r.warmup]
    code = outcome.exit_code
    colour = {0: "#2e7d32", 3: "#b26a00"}.get(code, "#b71c1c")
    parts = [
        f'<p style="color:{colour};font-weight:bold">{escape(outcome.verdict)}</p>',
        "<h2>May it be believed?</h2>" + checks_table(outcome.validity),
        f"<h2>Objectives: {escape(outcome.slo)}</h2>" + checks_table(outcome.verdicts),
        "<h2>Latencies</h2>" + _latency_table(outcome, summary),
        _distributions(outcome),
        "<h2>Longest gap over time</h2>"
        + line(_worst_gap_over_time(measured), "longest gap in the bin, ms"),
        "<h2>ITL over time</h2>" + line(_itl_over_time(measured), "median of the bin, ms"),
        "<h2>Goodput and rate over time</h2>" + _rates(outcome, measured),
        "<h2>By tenant</h2>" + group_table(measured, lambda r: f"tenant {r.tenant}"),
        "<h2>By priority</h2>" + group_table(measured, lambda r: f"priority {r.priority}"),
        "<h2>By the engine that finished it</h2>"
        + group_table(measured, lambda r: r.engine or "not told"),
        "<h2>By kind</h2>" + group_table(measured, lambda r: r.kind),
        "<h2>What the server said beside what the client saw</h2>"
        + _server(outcome, summary, measured),
        "<h2>Load</h2>" + facts_table(outcome.job.scenario.as_json().items()),
    ]
    return page("Headway load test", "".join(parts))


# -- tables --------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are escaped."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div style='overflow-x:auto'><table><tr>{top}</tr>{body}</table></div>"


def facts_table(facts: Iterable[tuple[str, object]]) -> str:
    return table(("", "value"), ((name, str(value)) for name, value in facts))


def checks_table(checks: Iterable[Check]) -> str:
    return table(
        ("", "value", "limit", ""),
        ((c.name, c.value, c.limit, "passed" if c.passed else "FAILED") for c in checks),
    )


def group_table(records: Iterable[Record], key: Callable[[Record], str]) -> str:
    """Percentiles per group; of the raw records, so exact."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    rows = []
    for name in sorted(groups):
        group = groups[name]
        ttft, tpot, itl = Distribution(), Distribution(), Distribution()
        for record in group:
            ttft.add(record.ttft_s)
            if record.tpot_s is not None:
                tpot.add(record.tpot_s)
            itl.add_all([gap / 1e6 for gap in record.gaps_us], 1)
        cells = (
            d.percentile(q) for d, q in ((ttft, 50), (ttft, 99), (tpot, 99), (itl, 50), (itl, 99))
        )
        rows.append([name, str(len(group)), *(_ms(cell) for cell in cells), _ms(itl.max)])
    head = ("", "requests", "TTFT P50", "TTFT P99", "TPOT P99", "ITL P50", "ITL P99", "longest gap")
    return table(head, rows) + "<p class=note>Milliseconds.</p>"


def _latency_table(outcome: Outcome, summary: dict[str, Any]) -> str:
    rows = []
    for name, row in summary["latencies_ms"].items():
        bound = "too few samples" if row["p99_bound"] is None else f"{row['p99_bound']:.1f}"
        cells = [f"{row[key]:.1f}" for key in ("mean", "p50", "p90", "p99")]
        rows.append([name, str(row["count"]), *cells, bound, f"{row['max']:.1f}"])
    head = ("", "samples", "mean", "P50", "P90", "P99", "P99 below (95% sure)", "longest")
    note = (
        "<p class=note>Milliseconds; HDR histograms to three digits. TTFT counts from the "
        "scheduled arrival, TPOT = (last - first) / (n - 1), ITL is pooled over all gaps.</p>"
    )
    counts = facts_table(
        [
            *summary["counts"].items(),
            ("requests/s", f"{summary['requests_per_s']:.3f}"),
            ("tokens/s", f"{summary['tokens_per_s']:.1f}"),
            ("goodput, requests/s", f"{outcome.goodput_rps:.3f}"),
        ]
    )
    return table(head, rows) + note + counts


def _server(outcome: Outcome, summary: dict[str, Any], measured: list[Record]) -> str:
    pairs = [
        ("TTFT", [(r.ttft_s, r.server_first_s) for r in measured]),
        ("E2E", [(r.e2e_s, r.server_total_s) for r in measured]),
    ]
    rows = []
    for name, values in pairs:
        both = [(seen, said) for seen, said in values if said is not None]
        if both:
            seen_s = statistics.median(seen for seen, _ in both)
            said_s = statistics.median(said for _, said in both)
            rows.append([f"{name} median", _ms(said_s), _ms(seen_s)])
    histograms = outcome.results.histograms
    for q in (50, 99):
        emitted, seen = (
            histograms["ITL emitted"].percentile_ms(q),
            histograms["ITL"].percentile_ms(q),
        )
        rows.append([f"ITL P{q}", f"{emitted:.2f}", f"{seen:.2f}"])
    counts, totals = outcome.results.counts, summary["server"]
    preempted = sum(engine["preemptions"] for engine in totals.values())
    rows.append(["output tokens", str(counts.server_tokens), str(counts.tokens)])
    rows.append(["preemptions", f"{preempted:g}", str(counts.preemptions)])
    engines = [[name, *(f"{v:g}" for v in row.values())] for name, row in sorted(totals.items())]
    names = next((list(row) for row in totals.values()), [])
    waiting = [
        (sample.at_s, float(sum(e["waiting"] for e in sample.engines)))
        for sample in outcome.results.server
    ]
    shown = table(("ms where a time", "server", "client"), rows)
    if engines:
        shown += "<h2>By engine</h2>" + table(("", *names), engines)
        shown += line(waiting, "requests waiting, all engines")
    return shown


# -- plots ---------------------------------------------------------------------------------------


def _distributions(outcome: Outcome) -> str:
    names = ("TTFT", "TPOT", "ITL", "longest gap", "ITL emitted")
    drawn = []
    for name in names:
        distribution = Distribution()
        for value_ms, count in outcome.results.histograms[name].recorded():
            distribution.add(value_ms / 1e3, count)
        drawn.append(distribution)
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{name}'
        for colour, name in zip(SERIES, names, strict=True)
    )
    note = "<p class=note>Share of samples at or below; time on a log scale.</p>"
    return f"{note}<p>{keys}</p>{cumulative(drawn)}"


def _gaps_in_time(records: list[Record]) -> dict[int, list[float]]:
    """Gaps in ms by the bin of the time in which they ended."""
    end = max((r.last_s for r in records), default=0.0) or 1.0
    bins: dict[int, list[float]] = defaultdict(list)
    for record in records:
        at = record.first_s
        for gap in record.gaps_us:
            at += gap / 1e6
            bins[min(BINS - 1, int(BINS * at / end))].append(gap / 1e3)
    return bins


def _over_time(
    records: list[Record], reduce: Callable[[list[float]], float]
) -> list[tuple[float, float]]:
    end = max((r.last_s for r in records), default=0.0) or 1.0
    bins = _gaps_in_time(records)
    return [((k + 0.5) * end / BINS, reduce(bins[k])) for k in sorted(bins)]


def _worst_gap_over_time(records: list[Record]) -> list[tuple[float, float]]:
    return _over_time(records, max)


def _itl_over_time(records: list[Record]) -> list[tuple[float, float]]:
    return _over_time(records, statistics.median)


def _rates(outcome: Outcome, measured: list[Record]) -> str:
    """Offered rate against goodput, in equally long stretches of the schedule."""
    end = max((r.at_s for r in measured), default=0.0)
    if end <= 0:
        return "<p class=note>All at once.</p>"
    stretches = 6
    offered, good = [0] * stretches, [0] * stretches
    for record in outcome.results.records:
        place = min(stretches - 1, int(stretches * record.at_s / end))
        offered[place] += 1
        good[place] += outcome.objectives.met_by(record)
    width = end / stretches
    rows = [
        [f"{k * width:.1f} to {(k + 1) * width:.1f} s", f"{o / width:.3f}", f"{g / width:.3f}"]
        for k, (o, g) in enumerate(zip(offered, good, strict=True))
    ]
    return table(("arrived", "offered, requests/s", "goodput, requests/s"), rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
