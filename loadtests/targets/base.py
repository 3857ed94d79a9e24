"""What the replayer needs of a server, and what a stream tells the replayer."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from loadtests.records import Record
from loadtests.scenario import PlannedRequest

Units: TypeAlias = list[Any]
"""A prompt or an output: token ids, or words where a server takes text only."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """kind: "headway" or "openai". address: HOST:PORT, or an URL for openai. timeout_s: per
    request. Keys come from the environment: HEADWAY_API_KEY, OPENAI_API_KEY."""

    kind: str = "headway"
    address: str = "127.0.0.1:50051"
    model: str = ""
    ca_file: str | None = None
    timeout_s: float = 600.0


@dataclass(slots=True)
class Lags:
    """Of all measured tokens of a child, in seconds: delivery minus emission, and the gaps between
    emissions of a stream. Arrays, since there are millions."""

    wire: array[float] = field(default_factory=lambda: array("d"))
    emitted: array[float] = field(default_factory=lambda: array("d"))


class Sink:
    """Takes in one stream's tokens as they come; the hot path of the client.

    start: the schedule's start on the clock of `now`; unix_offset: added to that clock it gives
    Unix time.
    """

    __slots__ = ("_lags", "_last_emit_s", "_start", "_unix_offset", "output", "record")

    def __init__(self, record: Record, start: float, unix_offset: float, lags: Lags) -> None:
        self.record = record
        self.output: Units = []
        self._start = start
        self._unix_offset = unix_offset
        self._lags = lags
        self._last_emit_s = 0.0

    def delta(self, now: float, first_index: int, count: int, emit_s: float = 0.0) -> None:
        """Some ids arrived at `now`. emit_s: when the server emitted them, 0 if it does not say."""
        record = self.record
        if first_index != record.tokens:
            record.faults += 1
        record.tokens += count
        record.messages += 1
        at = now - self._start
        if record.first_s < 0.0:
            record.first_s = at
        else:
            record.gaps_us.append(round((at - record.last_s) * 1e6))
        record.last_s = at
        if emit_s:
            self._emitted(now, emit_s)

    def _emitted(self, now: float, emit_s: float) -> None:
        lag = now + self._unix_offset - emit_s
        record = self.record
        record.wire_lag_us = max(record.wire_lag_us, round(lag * 1e6))
        if not record.warmup:
            self._lags.wire.append(lag)
            if self._last_emit_s:
                self._lags.emitted.append(emit_s - self._last_emit_s)
        self._last_emit_s = emit_s


class Target(Protocol):
    """A server under test. Used in one event loop."""

    async def open(self, seed: int) -> None:
        """Connect and prepare prompts. Raises HeadwayError when the server cannot be used."""

    def new_units(self, request: PlannedRequest) -> Units:
        """What this request adds to the history of its session."""

    async def send(self, prompt: Units, request: PlannedRequest, sink: Sink) -> None:
        """Stream the answer into the sink. Failures end in sink.record.error, by a short name."""

    async def status(self) -> list[dict[str, Any]]:
        """Engines as the server sees them now; empty when it does not say."""

    async def close(self) -> None:
        """End the connection."""
