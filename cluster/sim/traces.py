"""Recorded traffic: JSON lines as aiperf, guidellm and vLLM replay them, and the Azure CSV files.

Both kinds may be gzipped. A row that cannot be used is an error with its line and column, or is
skipped and counted, as the caller wants.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from cluster.core.errors import ConfigError
from cluster.sim.workload import SimRequest

DATA = Path(__file__).parent / "data"
SHIPPED = {
    "azure-conv": DATA / "azure2023_conv.csv.gz",
    "azure-code": DATA / "azure2023_code.csv.gz",
    "mooncake": DATA / "mooncake_conversation_head1500.jsonl.gz",
}
"""Traces that come with the product; data/SOURCES.md has their licences."""

MAX_LENGTH = 1 << 24
MAX_HASH_IDS = 1 << 16
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """rate_scale: 2 replays twice as fast. length_scale: times every length, at least 1 token.
    max_input, max_output: caps in tokens. limit: rows at most. skip_malformed: count bad rows
    instead of stopping at the first. spread: requests with one timestamp are spread evenly up to
    the next, for traces whose clock is coarse (Mooncake's ticks every 3 s)."""

    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    limit: int | None = None
    skip_malformed: bool = False
    spread: bool = False

    def __post_init__(self) -> None:
        for name in ("rate_scale", "length_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        for name in ("max_input", "max_output", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@dataclass(slots=True)
class Trace:
    """requests: by arrival, the first at 0 s. skipped: rows that were left out, with why."""

    requests: list[SimRequest]
    skipped: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self.requests)


class _BadRow(Exception):
    def __init__(self, column: str, why: str) -> None:
        self.column = column
        super().__init__(f"column {column!r}: {why}")


def find_trace(name: str) -> Path:
    """A shipped trace's name, or the path of a file."""
    path = SHIPPED.get(name.lower(), Path(name))
    if not path.is_file():
        raise ConfigError(f"no trace {name!r}: neither a file nor one of {', '.join(SHIPPED)}")
    return path


def read_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    """Raises ConfigError naming file, line and column of the first bad row unless skipping."""
    options = options or TraceOptions()
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
    reader = {"csv": _csv_rows, "jsonl": _json_rows, "json": _json_rows}.get(kind)
    if reader is None:
        raise ConfigError(f"{path}: a trace ends in .csv or .jsonl (or .gz after it)")
    trace = Trace([])
    with opened(path) as text:
        for line, parse in reader(path, text):
            if options.limit is not None and len(trace.requests) >= options.limit:
                break
            try:
                trace.requests.append(parse())
            except _BadRow as error:
                where = f"{path.name} line {line}, {error}"
                if not options.skip_malformed:
                    raise ConfigError(where) from None
                trace.skipped.append(where)
    if not trace.requests:
        raise ConfigError(f"{path}: no usable row")
    trace.requests = _prepared(trace.requests, options)
    return trace


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file's text, unzipped where its name says so. Raises ConfigError."""
    opener: Callable[..., TextIO] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as text:
            yield text
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _csv_rows(path: Path, text: TextIO) -> Iterator[tuple[int, Callable[[], SimRequest]]]:
    rows = csv.reader(text)
    header = next(rows, [])
    missing = [c for c in AZURE_COLUMNS if c not in header]
    if missing:
        raise ConfigError(f"{path.name} line 1: column {missing[0]!r} is missing, got {header[:8]}")
    places = [header.index(c) for c in AZURE_COLUMNS]
    for row in rows:
        if row:
            yield rows.line_num, lambda row=row: _azure(row, places)  # type: ignore[misc]


def _azure(row: list[str], places: list[int]) -> SimRequest:
    if len(row) <= max(places):
        missing = next(c for c, i in zip(AZURE_COLUMNS, places, strict=True) if i >= len(row))
        raise _BadRow(missing, f"the row ends after {len(row)} columns")
    stamp, prompt, output = (row[i] for i in places)
    return SimRequest(
        _seconds(stamp), _length("ContextTokens", prompt), _length("GeneratedTokens", output)
    )


def _seconds(stamp: str) -> float:
    """Azure writes seven digits of a second, datetime reads six."""
    whole, _, fraction = stamp.strip().removesuffix("+00:00").partition(".")
    try:
        moment = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc)
        return moment.timestamp() + (
            float(f"0.{int(fraction):0{len(fraction)}d}") if fraction else 0
        )
    except ValueError:
        raise _BadRow("TIMESTAMP", f"not a time: {stamp[:40]!r}") from None


def _json_rows(path: Path, text: TextIO) -> Iterator[tuple[int, Callable[[], SimRequest]]]:
    for line, raw in enumerate(text, start=1):
        if str(raw).strip():
            yield line, lambda raw=raw: _json_request(str(raw))  # type: ignore[misc]


def _json_request(raw: str) -> SimRequest:
    try:
        row: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _BadRow("(row)", f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadRow("(row)", f"not an object: {type(row).__name__}")
    stamp = row.get("timestamp")
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 1e15:
        raise _BadRow("timestamp", f"must be milliseconds >= 0, got {stamp!r:.40}")
    hashes = row.get("hash_ids", [])
    if not isinstance(hashes, list) or len(hashes) > MAX_HASH_IDS:
        raise _BadRow("hash_ids", f"must be a list of at most {MAX_HASH_IDS} integers")
    if any(isinstance(h, bool) or not isinstance(h, int) for h in hashes):
        raise _BadRow("hash_ids", "must hold integers only")
    return SimRequest(
        stamp / 1e3,
        _length("input_length", row.get("input_length")),
        _length("output_length", row.get("output_length")),
        tuple(hashes),
    )


def _length(column: str, value: object) -> int:
    try:
        if isinstance(value, bool | float) or value is None:
            raise ValueError
        length = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise _BadRow(column, f"must be an integer, got {value!r:.40}") from None
    if not 1 <= length <= MAX_LENGTH:
        raise _BadRow(column, f"must be between 1 and {MAX_LENGTH}, got {length}")
    return int(length)


def _prepared(requests: list[SimRequest], options: TraceOptions) -> list[SimRequest]:
    requests.sort(key=lambda r: r.arrival_s)
    first = requests[0].arrival_s
    times = [(r.arrival_s - first) / options.rate_scale for r in requests]
    if options.spread:
        times = _spread(times)
    return [
        SimRequest(
            at,
            _scaled(r.input_length, options.length_scale, options.max_input),
            _scaled(r.output_length, options.length_scale, options.max_output),
            r.hash_ids if options.length_scale == 1.0 else (),
        )
        for at, r in zip(times, requests, strict=True)
    ]


def _scaled(length: int, scale: float, cap: int | None) -> int:
    scaled = length if scale == 1.0 else max(1, math.floor(length * scale + 0.5))
    return scaled if cap is None else min(scaled, cap)


def _spread(times: list[float]) -> list[float]:
    """Ties become evenly spaced over the time to the next tick; the last tick's keep its length."""
    spread: list[float] = []
    start, tick = 0, 0.0
    while start < len(times):
        end = start
        while end < len(times) and times[end] == times[start]:
            end += 1
        tick = times[end] - times[start] if end < len(times) else tick
        spread += [times[start] + tick * i / (end - start) for i in range(end - start)]
        start = end
    return spread
