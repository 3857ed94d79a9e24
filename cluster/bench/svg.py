"""Plots as SVG files that need nothing else and are readable on light and on dark ground."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

WIDTH, PANEL_HEIGHT = 820, 250
TOP, TITLE_Y, LINE = 44, 26, 16
LEFT, RIGHT, BOTTOM = 72, 20, 50
NAMES = 88
"""Room beside horizontal bars for what they are called."""

_STYLE = """
text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}
.note{fill:#5a5a5a;font-size:11px}.ground{fill:#fff}.axis{stroke:#888;fill:none}
.grid{stroke:#e4e4e4}.l{fill:none;stroke-width:2}
%s@media (prefers-color-scheme:dark){
text{fill:#ddd}.note{fill:#a5a5a5}.ground{fill:#16181c}.axis{stroke:#888}.grid{stroke:#30343a}
%s}
"""
LIGHT = ("#2f6fb3", "#c8442f", "#2f8a57", "#8453a8", "#a8700d")
DARK = ("#79b0ea", "#f08a78", "#74c998", "#c39ae3", "#e0b04f")


def _colours(colours: Sequence[str]) -> str:
    """Lines are .l with a class of these, whatever is filled is .f. No CSS variables: few programs
    beside browsers know them."""
    return "".join(
        f".l.c{i}{{stroke:{colour}}}.f.c{i}{{fill:{colour}}}\n" for i, colour in enumerate(colours)
    )


STYLE = _STYLE % (_colours(LIGHT), _colours(DARK))


@dataclass(frozen=True, slots=True)
class Axis:
    """label: what, with its unit. log: by powers; only for values above 0."""

    label: str
    log: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A horizontal bar per name, with its value written beside it."""

    axis: Axis
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Lines:
    """A line per name over the same x; y begins at 0 unless it is logarithmic."""

    x_axis: Axis
    y_axis: Axis
    x: Sequence[float]
    series: Mapping[str, Sequence[float]]


Panel: TypeAlias = Bars | Lines


def figure(title: str, notes: Sequence[str], panels: Sequence[Panel], about: Any) -> str:
    """panels: side by side. notes: lines below them. about: goes into the file's metadata as JSON,
    to be read back by `metadata_of`."""
    height = TOP + PANEL_HEIGHT + BOTTOM + LINE * len(notes)
    each = WIDTH / len(panels)
    drawn = "".join(
        _panel(panel, _Frame(i * each + LEFT, (i + 1) * each - RIGHT, TOP, TOP + PANEL_HEIGHT))
        for i, panel in enumerate(panels)
    )
    below = TOP + PANEL_HEIGHT + BOTTOM + 6
    written = "".join(
        f'<text class="note" x="12" y="{below + LINE * i}">{escape(note)}</text>'
        for i, note in enumerate(notes)
    )
    facts = escape(json.dumps(about), quote=False)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<metadata>{facts}</metadata>\n<style>{STYLE}</style>\n"
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>\n'
        f'<text class="title" x="12" y="{TITLE_Y}">{escape(title)}</text>\n'
        f"{drawn}{written}\n</svg>\n"
    )


def metadata_of(svg: str) -> Any:
    """What `figure` was given as `about`."""
    from xml.etree import ElementTree

    found = ElementTree.fromstring(svg).find("{http://www.w3.org/2000/svg}metadata")
    if found is None or found.text is None:
        raise ValueError("no metadata in this SVG")
    return json.loads(found.text)


# -- panels ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Frame:
    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            # Five at most, or their numbers run into each other where panels are narrow.
            return [10.0**power for power in range(first, last + 1, 1 + (last - first) // 4)]
        step = _nice((self.high - self.low) / 4)
        return [step * i for i in range(math.floor(self.high / step) + 1)]


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    most = max(values)
    if not axis.log:
        return _Scale(0.0, 1.08 * most or 1.0, start, end)
    above = [value for value in values if value > 0]
    low = math.floor(math.log10(min(above)))
    high = max(low + 1, math.ceil(math.log10(most)))
    return _Scale(10.0**low, 10.0**high, start, end, log=True)


def _panel(panel: Panel, frame: _Frame) -> str:
    return _bars(panel, frame) if isinstance(panel, Bars) else _lines(panel, frame)


def _bars(panel: Bars, frame: _Frame) -> str:
    left = frame.left - LEFT + NAMES
    # The values stand right of the bars.
    values = list(panel.values.values())
    scale = _scale(panel.axis, [1.0, *values] if panel.axis.log else values, left, frame.right - 44)
    row = (frame.bottom - frame.top) / len(panel.values)
    parts = [_x_axis(panel.axis, scale, scale.ticks(), frame, left)]
    for i, (name, value) in enumerate(panel.values.items()):
        y, end = frame.top + row * (i + 0.5), scale(value)
        width = max(end - left, 1.0)
        parts.append(
            f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="f c{i % 5}" x="{left:.1f}" y="{y - row * 0.31:.1f}"'
            f' width="{width:.1f}" height="{row * 0.62:.1f}"/>'
            f'<text x="{left + width + 5:.1f}" y="{y + 4:.1f}">{shown(value)}</text>'
        )
    return "".join(parts)


def _lines(panel: Lines, frame: _Frame) -> str:
    x_scale = _x_scale(panel, frame)
    values = [value for line in panel.series.values() for value in line]
    y_scale = _scale(panel.y_axis, values, frame.bottom, frame.top + 18 * len(panel.series))
    parts = [
        _x_axis(panel.x_axis, x_scale, panel.x, frame, frame.left),
        _y_axis(panel.y_axis, y_scale, frame),
    ]
    for i, (name, line) in enumerate(panel.series.items()):
        at = [(x_scale(x), y_scale(y)) for x, y in zip(panel.x, line, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        key = frame.top + 14 * i
        parts.append(
            f'<polyline class="l c{i % 5}" points="{path}"/>'
            + "".join(
                f'<circle class="f c{i % 5}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in at
            )
            + f'<path class="l c{i % 5}" d="M{frame.left + 10:.1f} {key}h18"/>'
            f'<text x="{frame.left + 34:.1f}" y="{key + 4}">{escape(name)}</text>'
        )
    return "".join(parts)


def _x_scale(panel: Lines, frame: _Frame) -> _Scale:
    """From the first x to the last."""
    first, last = min(panel.x), max(panel.x)
    return _Scale(first, last, frame.left + 12, frame.right - 8, log=panel.x_axis.log)


def _x_axis(axis: Axis, scale: _Scale, ticks: Sequence[float], frame: _Frame, left: float) -> str:
    marks = "".join(
        f'<path class="grid" d="M{scale(tick):.1f} {frame.top - 6}V{frame.bottom}"/>'
        f'<text class="note" x="{scale(tick):.1f}" y="{frame.bottom + 16}"'
        f' text-anchor="middle">{shown(tick)}</text>'
        for tick in ticks
    )
    middle = (left + frame.right) / 2
    return (
        f'{marks}<path class="axis" d="M{left:.1f} {frame.top - 6}V{frame.bottom}'
        f'H{frame.right:.1f}"/>'
        f'<text x="{middle:.1f}" y="{frame.bottom + 36}" text-anchor="middle">'
        f"{escape(axis.label)}</text>"
    )


def _y_axis(axis: Axis, scale: _Scale, frame: _Frame) -> str:
    marks = "".join(
        f'<path class="grid" d="M{frame.left:.1f} {scale(tick):.1f}H{frame.right:.1f}"/>'
        f'<text class="note" x="{frame.left - 6:.1f}" y="{scale(tick) + 4:.1f}"'
        f' text-anchor="end">{shown(tick)}</text>'
        for tick in scale.ticks()
    )
    x, y = frame.left - 54, (frame.top + frame.bottom) / 2
    return (
        f'{marks}<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle"'
        f' transform="rotate(-90 {x:.1f} {y:.1f})">{escape(axis.label)}</text>'
    )


def shown(value: float) -> str:
    """Three digits that count, thousands by commas."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= step * 0.999)
