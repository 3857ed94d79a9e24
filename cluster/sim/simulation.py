"""The event loop in virtual time: arrivals are placed, engines step, tokens are metered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol

from cluster.core.errors import ConfigError, Overloaded
from cluster.core.plan import StepPlan
from cluster.engine.core import (
    MAX_WAITING_TOLD,
    StepReport,
    StreamKey,
    StreamStats,
    StreamTokens,
)
from cluster.fleet.dispatch import Fleet
from cluster.fleet.job import Job
from cluster.fleet.relief import Waiting
from cluster.fleet.snapshot import EngineCapacity, EngineSnapshot
from cluster.sim.coast import Stretch
from cluster.sim.engine import CONNECTION, SYNTHETIC_TOKEN, SimEngine, engine_request
from cluster.sim.fleetchoice import FleetChoice
from cluster.sim.metrics import EngineTotals, Meter, Summary, summarise
from cluster.sim.workload import SimRequest

PROGRESS_EVENTS = 4096
"""Events between two calls of the progress callback."""


class Observer(Protocol):
    def stepped(self, engine: SimEngine, plan: StepPlan, report: StepReport, now: float) -> None:
        """A step that began at engine.started_s is done at `now`."""


class _Stream:
    """A request under way. engine: index of the one that has it. Of the engines that had it before:
    preemptions, recomputed_tokens, stalled_s; queue_s: before its first step, once it had begun."""

    __slots__ = ("asked", "engine", "job", "lost_s", "past", "stream")

    def __init__(self, stream: int, asked: SimRequest, job: Job) -> None:
        self.stream = stream
        self.asked = asked
        self.job = job
        self.engine = -1
        self.past: StreamStats | None = None
        self.lost_s: float | None = None
        """Since when it could have gone on, if it was moved after it had begun."""


class Simulation:
    """Runs a workload through engines; one use. It is the courier of the fleet.

    Requests that no engine can hold, and those that the fleet's gate turns away, are counted as
    refused. A request reaches its engine, and a step's tokens their reader, in no time.
    """

    def __init__(
        self,
        engines: list[SimEngine],
        workload: Iterable[SimRequest],
        meter: Meter,
        fleet: FleetChoice | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("engines must be at least 1, got 0")
        self.meter = meter
        self._engines = engines
        self._arrivals = _checked(workload)
        self._observer = observer
        choice = fleet or FleetChoice()
        self._fleet = choice.build(self)
        # What one engine says may change what another does next: nobody runs ahead.
        self._coasting = observer is None and not choice.reacts
        self._sent = [0] * len(engines)
        self._by_name = {engine.name: i for i, engine in enumerate(engines)}
        self._streams: dict[int, _Stream] = {}
        self._of_job: dict[Job, _Stream] = {}
        for engine in engines:
            self._fleet.joined(EngineSnapshot(engine.name, _capacity(engine)), 0.0)
        self._longest = max(e.core.scheduler.config.max_sequence_len for e in engines)
        self._now = 0.0
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
        self._expire(math.inf)
        self._require_drained()
        self.meter.totals.moves = self._fleet.moved
        return summarise(self.meter, self._engine_totals())

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    # -- the fleet's courier -------------------------------------------------------------------

    def send(self, job: Job, engine: EngineSnapshot) -> int:
        entry = self._of_job[job]
        index = self._by_name[engine.engine_id]
        entry.engine = index
        request = engine_request(entry.stream, entry.asked)
        emitted = job.tokens - entry.asked.input_length
        if emitted:
            request = replace(request, emitted_ids=(SYNTHETIC_TOKEN,) * emitted)
        target = self._engines[index]
        if target.submit(entry.stream, request, self._now) is not None:
            self._forget(entry)
            self.meter.refused(entry.stream)
        self._sent[index] += 1
        # Not at once: others may arrive at this same moment, and belong into the same step.
        if not target.stepping:
            self._schedule(index, self._now)
        return self._sent[index]

    def take_back(self, job: Job) -> None:
        entry = self._of_job[job]
        core = self._engines[entry.engine].core
        key = StreamKey(CONNECTION, entry.stream)
        waiting = next(w for w in core.waiting(MAX_WAITING_TOLD, self._now) if w.key == key)
        job.tokens = waiting.tokens
        entry.past = StreamStats(
            0.0,
            waiting.preemptions + (entry.past.preemptions if entry.past else 0),
            waiting.recomputed_tokens + (entry.past.recomputed_tokens if entry.past else 0),
            waiting.stalled_s + (entry.past.stalled_s if entry.past else 0.0),
        )
        entry.lost_s = self._now if waiting.preemptions else None
        core.abort(key)

    # -- events --------------------------------------------------------------------------------

    def _arrive(self, stream: int, asked: SimRequest) -> None:
        now = self._now = asked.arrival_s
        self.meter.arrived(stream, now)
        length = asked.input_length + asked.output_length
        if length > self._longest:
            self.meter.refused(stream)
            return
        job = Job(
            asked.input_length,
            length,
            tenant=asked.tenant,
            priority=asked.priority,
            arrival_s=now,
        )
        entry = _Stream(stream, asked, job)
        self._streams[stream] = entry
        self._of_job[job] = entry
        try:
            self._fleet.offer(job, now)
        except Overloaded:
            self._forget(entry)
            self.meter.refused(stream)

    def _forget(self, entry: _Stream) -> None:
        del self._streams[entry.stream]
        del self._of_job[entry.job]

    def _expire(self, now: float) -> None:
        for job in self._fleet.overdue(now):
            entry = self._of_job[job]
            self._forget(entry)
            self.meter.refused(entry.stream)

    def _advance(self, index: int, now: float, until: float) -> None:
        """An engine's event: its step is done, or it is time to ask it for one.

        until: when the next request arrives; up to then nobody looks at this engine.
        """
        engine = self._engines[index]
        self._now = now
        self._due[index] = math.inf
        if (landed := engine.land()) is not None:
            self._take(index, landed)
        elif engine.stepping:
            self._finish_step(index, now)
        if self._coasting:
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
        self.meter.step(self._whole_story(report.tokens), now)
        for failure in report.failures:
            self.meter.failed(failure.key.stream)
            self._forget(self._streams[failure.key.stream])
        waiting = [Waiting(self._streams[w.key.stream].job, w.tokens) for w in report.waiting]
        self._fleet.heard(engine.name, report.load, self._sent[index], waiting, now)
        if self._fleet.waiting:
            self._expire(now)
        if self._observer is not None and plan is not None:
            self._observer.stepped(engine, plan, report, now)

    def _whole_story(self, tokens: list[StreamTokens]) -> list[StreamTokens]:
        """With what earlier engines had to do for those who finish."""
        for at, part in enumerate(tokens):
            if part.finish is None:
                continue
            entry = self._streams[part.key.stream]
            if entry.past is not None and part.stats is not None:
                tokens[at] = part._replace(stats=_joined(entry, part.stats))
            self._forget(entry)
        return tokens

    def _take(self, index: int, stretch: Stretch) -> None:
        self.meter.stretch(stretch)
        for stream, _, _ in stretch.finished:
            self._forget(self._streams[stream])
        now = stretch.ends[-1]
        engine = self._engines[index]
        self._fleet.heard(engine.name, engine.core.load(now), self._sent[index], (), now)

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


def _capacity(engine: SimEngine) -> EngineCapacity:
    config = engine.core.scheduler.config
    return EngineCapacity(
        config.max_sequence_len,
        config.block_size,
        config.num_blocks,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )


def _joined(entry: _Stream, last: StreamStats) -> StreamStats:
    """What all engines that had a stream did for it. What it waited for at the last one counts as
    a stall if it had begun before."""
    past = entry.past or StreamStats(0.0, 0, 0, 0.0)
    stalled = last.queue_s if entry.lost_s is not None else 0.0
    return StreamStats(
        last.queue_s,
        past.preemptions + last.preemptions,
        past.recomputed_tokens + last.recomputed_tokens,
        past.stalled_s + stalled + last.stalled_s,
    )


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
