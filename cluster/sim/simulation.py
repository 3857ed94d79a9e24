"""The event loop in virtual time: arrivals are placed, engines step, tokens are metered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Protocol

from cluster.core.errors import ConfigError
from cluster.core.plan import StepPlan
from cluster.engine.core import StepReport
from cluster.fleet.placement import LeastLoaded, Placement
from cluster.fleet.snapshot import EngineSnapshot
from cluster.sim.coast import Stretch
from cluster.sim.engine import SimEngine, engine_request
from cluster.sim.metrics import EngineTotals, Meter, Summary, summarise
from cluster.sim.workload import SimRequest

PROGRESS_EVENTS = 4096
"""Events between two calls of the progress callback."""


class Observer(Protocol):
    def stepped(self, engine: SimEngine, plan: StepPlan, report: StepReport, now: float) -> None:
        """A step that began at engine.started_s is done at `now`."""


class Simulation:
    """Runs a workload through engines; one use.

    Requests that no engine can hold are counted as refused. A request reaches its engine, and a
    step's tokens their reader, in no time.
    """

    def __init__(
        self,
        engines: list[SimEngine],
        workload: Iterable[SimRequest],
        meter: Meter,
        placement: Placement | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("engines must be at least 1, got 0")
        self.meter = meter
        self._engines = engines
        self._arrivals = _checked(workload)
        self._placement = placement or LeastLoaded()
        self._observer = observer
        self._snapshots = [
            EngineSnapshot(e.name, e.core.scheduler.config.max_sequence_len) for e in engines
        ]
        self._by_name = {engine.name: i for i, engine in enumerate(engines)}
        self._last_stream = [0] * len(engines)
        # An engine has one event that counts, the newest: due[i]. Older ones are passed over.
        self._events: list[tuple[float, int]] = []
        self._due = [math.inf] * len(engines)

    def run(self, progress: Callable[[int], None] | None = None) -> Summary:
        """progress: told the number of finished requests now and then."""
        arrivals = self._arrivals
        events, due = self._events, self._due
        upcoming = next(arrivals, None)
        number = 0
        countdown = PROGRESS_EVENTS
        while upcoming is not None or events:
            if upcoming is not None and (not events or upcoming.arrival_s <= events[0][0]):
                number += 1
                self._arrive(number, upcoming)
                now, upcoming = upcoming.arrival_s, next(arrivals, None)
                if upcoming is None:
                    self._close_arrivals(now)
            else:
                now, index = heappop(events)
                if due[index] == now:
                    self._advance(index, now, upcoming.arrival_s if upcoming else math.inf)
            countdown -= 1
            if countdown == 0:
                countdown = PROGRESS_EVENTS
                if progress is not None:
                    progress(self.meter.totals.finished)
        self._require_drained()
        return summarise(self.meter, self._engine_totals())

    def _arrive(self, stream: int, asked: SimRequest) -> None:
        now = asked.arrival_s
        self.meter.arrived(stream, now)
        length = asked.input_length + asked.output_length
        chosen = self._placement.choose(self._snapshots, length)
        if chosen is None:
            self.meter.refused(stream)
            return
        index = self._by_name[chosen.engine_id]
        engine = self._engines[index]
        refusal = engine.submit(stream, engine_request(stream, asked), now)
        if refusal is not None:
            self.meter.refused(stream)
            return
        chosen.submitted(stream, asked.input_length)
        self._last_stream[index] = stream
        # Not at once: others may arrive at this same moment, and belong into the same step.
        if not engine.stepping:
            self._schedule(index, now)

    def _advance(self, index: int, now: float, until: float) -> None:
        """An engine's event: its step is done, or it is time to ask it for one.

        until: when the next request arrives; up to then nobody looks at this engine.
        """
        engine = self._engines[index]
        self._due[index] = math.inf
        if (landed := engine.land()) is not None:
            self._take(index, landed)
        elif engine.stepping:
            self._finish_step(index, now)
        if self._observer is None:
            while (stretch := engine.coast(now, until)) is not None:
                self._take(index, stretch)
                now = stretch.ends[-1]
        done_s = engine.begin(now)
        if done_s is None:
            done_s = engine.wake_s(now)
        if done_s is not None:
            self._schedule(index, done_s)

    def _finish_step(self, index: int, now: float) -> None:
        engine = self._engines[index]
        plan = engine.plan
        report = engine.finish(now)
        self.meter.step(report.tokens, now)
        for failure in report.failures:
            self.meter.failed(failure.key.stream)
        self._snapshots[index].updated(report.load, self._last_stream[index])
        if self._observer is not None and plan is not None:
            self._observer.stepped(engine, plan, report, now)

    def _take(self, index: int, stretch: Stretch) -> None:
        self.meter.stretch(stretch)
        load = self._engines[index].core.load(stretch.ends[-1])
        self._snapshots[index].updated(load, self._last_stream[index])

    def _schedule(self, index: int, at: float) -> None:
        if at != self._due[index]:
            self._due[index] = at
            heappush(self._events, (at, index))

    def _close_arrivals(self, now: float) -> None:
        """Nobody comes any more: whoever waits for company starts now."""
        for index, engine in enumerate(self._engines):
            engine.close_arrivals()
            if not engine.stepping and len(engine.core.scheduler):
                self._schedule(index, now)

    def _require_drained(self) -> None:
        for engine in self._engines:
            if left := len(engine.core.scheduler):
                cause = engine.core.scheduler.wait_cause or "no cause named"
                raise ConfigError(f"{engine.name} cannot go on with {left} requests: {cause}")

    def _engine_totals(self) -> EngineTotals:
        totals = EngineTotals(engines=len(self._engines))
        for engine in self._engines:
            counters = engine.core.scheduler.counters
            totals.steps += counters.steps
            totals.computed_tokens += counters.computed_tokens
            totals.prefix_hit_tokens += counters.prefix_hit_tokens
            totals.busy_s += engine.busy_s
        return totals


def _checked(workload: Iterable[SimRequest]) -> Iterator[SimRequest]:
    """Refuses what a clock cannot follow."""
    before = 0.0
    for number, asked in enumerate(workload, start=1):
        if not before <= asked.arrival_s < math.inf:
            raise ConfigError(
                f"request {number}: arrival must be at {before!r} s or later, "
                f"got {asked.arrival_s!r}"
            )
        before = asked.arrival_s
        yield asked
