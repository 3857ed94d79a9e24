"""A report as one HTML file that needs nothing else: tables and inline SVG plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from cluster.sim.distribution import Distribution
from cluster.sim.metrics import Meter, Summary, summary_rows
from cluster.sim.recorder import Recorder, StepKind, StepSpan

WIDTH, HEIGHT = 960, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 34
COLOURS = {StepKind.DECODE: "#3b82c4", StepKind.PREFILL: "#d9534f", StepKind.MIXED: "#8e5ea2"}
SERIES = ("#3b82c4", "#d9534f", "#4c9f70", "#8e5ea2", "#c98a1b")

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse}
td,th{padding:.2em .9em .2em 0;text-align:right}td:first-child,th:first-child{text-align:left}
tr{border-bottom:1px solid #ddd}svg{width:100%;height:auto}text{font:11px sans-serif;fill:#555}
.key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}.note{color:#666}
"""


def report_html(
    title: str, facts: dict[str, str], summary: Summary, meter: Meter, recorder: Recorder
) -> str:
    """facts: what was simulated, shown as given."""
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in facts.items())
    numbers = "".join(
        f"<tr><td>{escape(label)}</td><td>{escape(value)}</td></tr>"
        for label, value in summary_rows(summary)
    )
    latencies = {"TTFT": meter.ttft, "TPOT": meter.tpot, "ITL": meter.itl}
    parts = [
        f"<table>{rows}</table>",
        f"<h2>Result</h2><table>{numbers}</table>",
        f"<h2>The first steps</h2>{_key()}{timeline(recorder.first)}",
        f"<h2>Around the longest step</h2>{_key()}{timeline(recorder.around_longest)}",
        "<h2>Latencies</h2><p class=note>Share of samples at or below; time on a log scale.</p>"
        + _legend(list(latencies))
        + cumulative(list(latencies.values())),
        "<h2>KV blocks in use</h2>" + line(recorder.kv_use.points(), "share of the pool"),
    ]
    return page(title, "".join(parts))


def page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def sweep_html(title: str, name: str, rows: Sequence[tuple[object, Summary]]) -> str:
    """The trade-off: throughput against the tail of the gaps, one dot per value."""
    points = [(s.itl_p99_ms, s.tok_s, f"{name} {value}") for value, s in rows]
    head = f"<tr><th>{escape(name)}</th>" + "".join(
        f"<th>{escape(label)}</th>" for label, _ in summary_rows(rows[0][1])
    )
    body = "".join(
        f"<tr><td>{escape(str(value))}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for _, cell in summary_rows(summary))
        + "</tr>"
        for value, summary in rows
    )
    plot = scatter(points, "ITL P99, ms", "tokens per second")
    return page(title, f"{plot}<div style='overflow-x:auto'><table>{head}</tr>{body}</table></div>")


# -- plots ---------------------------------------------------------------------------------------


def timeline(spans: Sequence[StepSpan]) -> str:
    """Bars as wide as a step is long and as high as it has tokens (square root)."""
    if not spans:
        return "<p class=note>No steps.</p>"
    start, end = spans[0].start_s, max(spans[-1].end_s, spans[0].start_s + 1e-9)
    most = max(span.tokens for span in spans)
    bars = []
    for span in spans:
        x, right = _x(span.start_s, start, end), _x(span.end_s, start, end)
        height = (HEIGHT - TOP - BOTTOM) * math.sqrt(span.tokens / most)
        label = (
            f"{span.kind.value}: {span.tokens} tokens, {span.rows} rows, "
            f"{1e3 * (span.end_s - span.start_s):.2f} ms"
        )
        bars.append(
            f'<rect x="{x:.2f}" y="{HEIGHT - BOTTOM - height:.2f}"'
            f' width="{max(right - x, 0.3):.2f}" height="{height:.2f}" fill="{COLOURS[span.kind]}">'
            f"<title>{label}</title></rect>"
        )
    return _svg(
        "".join(bars) + _axes((start, end), (0.0, math.sqrt(most)), "s", "tokens", sqrt_y=True)
    )


def cumulative(distributions: Sequence[Distribution]) -> str:
    """Share of samples at or below a time, one line per distribution."""
    present = [d for d in distributions if d.count]
    if not present:
        return "<p class=note>No samples.</p>"
    low = math.log10(max(1e-3, 1e3 * min(d.min for d in present)))
    high = max(low + 0.1, math.log10(max(1e-3, 1e3 * max(d.max for d in present))))
    lines = []
    quantiles = tuple(100.0 * i / 200 for i in range(201))
    for colour, distribution in zip(SERIES, distributions, strict=False):
        if not distribution.count:
            continue
        values = distribution.percentiles(quantiles)
        path = " ".join(
            f"{_x(math.log10(max(1e-3, 1e3 * v)), low, high):.1f},{_y(q / 100, 0.0, 1.0):.1f}"
            for q, v in zip(quantiles, values, strict=True)
        )
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
    return _svg("".join(lines) + _axes((low, high), (0.0, 1.0), "ms", "share", log_x=True))


def line(points: Sequence[tuple[float, float]], label: str) -> str:
    """Points over time in seconds."""
    if not points:
        return "<p class=note>No samples.</p>"
    end = max(points[-1][0], 1e-9)
    top = max(0.05, *(share for _, share in points)) if len(points) > 1 else 1.0
    path = " ".join(f"{_x(t, 0.0, end):.1f},{_y(v, 0.0, top):.1f}" for t, v in points)
    drawn = f'<polyline points="{path}" fill="none" stroke="{SERIES[0]}" stroke-width="1.2"/>'
    return _svg(drawn + _axes((0.0, end), (0.0, top), "s", label))


def scatter(points: Sequence[tuple[float, float, str]], x_label: str, y_label: str) -> str:
    """Labelled dots (x, y, label), both axes from 0."""
    right = 1.1 * max(x for x, _, _ in points) or 1.0
    top = 1.1 * max(y for _, y, _ in points) or 1.0
    dots = "".join(
        f'<circle cx="{_x(x, 0, right):.1f}" cy="{_y(y, 0, top):.1f}" r="4" fill="{SERIES[0]}"/>'
        f'<text x="{_x(x, 0, right) + 7:.1f}" y="{_y(y, 0, top) - 5:.1f}">{escape(label)}</text>'
        for x, y, label in points
    )
    return _svg(dots + _axes((0.0, right), (0.0, top), x_label, y_label))


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{content}</svg>'


def _axes(
    xs: tuple[float, float],
    ys: tuple[float, float],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    sqrt_y: bool = False,
) -> str:
    base, parts = HEIGHT - BOTTOM, []
    for i in range(6):
        value = xs[0] + (xs[1] - xs[0]) * i / 5
        shown = 10**value if log_x else value
        x = _x(value, *xs)
        parts.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="middle">{shown:.4g}</text>')
    for i in range(3):
        value = ys[0] + (ys[1] - ys[0]) * i / 2
        shown = value * value if sqrt_y else value
        y = _y(value, *ys)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown:.4g}</text>')
    right = WIDTH - RIGHT
    parts.append(f'<path d="M{LEFT} {TOP}V{base}H{right}" fill="none" stroke="#999"/>')
    parts.append(f'<text x="{right}" y="{base + 28}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT + 4}" y="{TOP + 2}">{escape(y_label)}</text>')
    return "".join(parts)


def _x(value: float, low: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def _key() -> str:
    return "<p>" + "".join(_swatch(c, k.value) for k, c in COLOURS.items()) + "</p>"


def _legend(names: Sequence[str]) -> str:
    return "<p>" + "".join(_swatch(c, n) for c, n in zip(SERIES, names, strict=False)) + "</p>"


def _swatch(colour: str, name: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>{escape(name)}'
