"""Where every stream of one router is to run: placed, waiting at the router, or moved.

The router's dispatcher and the simulator drive the same object; it decides, a courier carries out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.core.load import EngineLoad
from cluster.fleet.binding import Binding, LateBinding
from cluster.fleet.engines import EngineSet
from cluster.fleet.gate import Gate, GateSettings
from cluster.fleet.job import Job
from cluster.fleet.placements.base import Candidates, Placement
from cluster.fleet.placements.least import LeastOutstanding
from cluster.fleet.relief import Relief, ReliefSettings, Waiting
from cluster.fleet.snapshot import EngineSnapshot
from cluster.fleet.waiting import WaitingJobs

_TYPICAL_TOKENS = 256
"""Prompt of a newcomer, while there is none to go by."""


class Courier(Protocol):
    """Carries decisions out."""

    def send(self, job: Job, engine: EngineSnapshot) -> int:
        """Submit the job's log to the engine; the stream's number there."""

    def take_back(self, job: Job) -> None:
        """Give the job up at the engine that has it; it goes on elsewhere."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """seed: of draws among many engines; routers of one fleet take different ones."""

    gate: GateSettings = field(default_factory=GateSettings)
    relief: ReliefSettings = field(default_factory=ReliefSettings)
    seed: int = 0


class Fleet:
    """Times are seconds on the caller's clock. Not thread-safe."""

    def __init__(
        self,
        courier: Courier,
        placement: Placement | None = None,
        settings: FleetSettings | None = None,
        binding: Binding | None = None,
    ) -> None:
        self.settings = settings or FleetSettings()
        self.engines = EngineSet(self.settings.seed)
        self.waiting = WaitingJobs()
        self.gate = Gate(self.settings.gate)
        self.moved = 0
        """Moves by relief so far."""
        self._relief = Relief(self.settings.relief)
        self._courier = courier
        self._placement = placement or LeastOutstanding()
        self._binding = binding or LateBinding()

    # -- engines -------------------------------------------------------------------------------

    def joined(self, engine: EngineSnapshot, now: float) -> None:
        """An engine takes work from now on."""
        self.engines.add(engine)
        self._placement.joined(engine)
        self._bind_waiting(now)

    def left(self, engine_id: str) -> None:
        """An engine is lost; the caller brings its jobs back with `again`."""
        if self.engines.remove(engine_id) is not None:
            self._placement.left(engine_id)

    def drain(self, engine_id: str, undo: bool = False) -> None:
        """No new work for this engine, or work again."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.draining = not undo
            self.engines.changed(engine)

    def heard(
        self,
        engine_id: str,
        load: EngineLoad,
        seen: int,
        waiting: Iterable[Waiting],
        now: float,
    ) -> None:
        """A frame of an engine: its load, the newest stream it knows, and which of this router's
        jobs wait there, in its order."""
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        engine.updated(load, seen)
        self.engines.changed(engine)
        self._relieve(engine, waiting, now)
        if self.waiting:
            self._bind_waiting(now)

    # -- jobs ----------------------------------------------------------------------------------

    def offer(self, job: Job, now: float) -> None:
        """A new job: sent at once where there is room, else it waits. Raises Overloaded."""
        ahead = self.waiting.peek()
        if ahead is None or job.priority > ahead.priority:
            engine = self._choose(job)
            if engine is not None:
                self._send(job, engine, now)
                return
        # Whoever is first in line was tried when the last frame came; a newcomer changes nothing.
        self.gate.check(job, self.waiting, self._prefill_s, now)
        job.queued_s = now
        self.waiting.push(job)

    def again(self, job: Job, now: float) -> None:
        """A job that lost its engine: ahead of newcomers, and never refused."""
        if not self.waiting:
            engine = self._choose(job)
            if engine is not None:
                self._send(job, engine, now)
                return
        job.queued_s = now
        self.waiting.push_returning(job)
        self._bind_waiting(now)

    def drop(self, job: Job) -> None:
        """Nobody wants it any more. Idempotent; one that was sent is the courier's."""
        if job in self.waiting:
            self.waiting.remove(job)

    def overdue(self, now: float) -> list[Job]:
        """Jobs that have waited longer than they may; they are dropped. Nobody waits beyond the
        time in which the first token is wanted, unless it has begun before."""
        late = [job for job in self.waiting if now - job.queued_s >= self.gate.patience_s(job)]
        for job in late:
            self.waiting.remove(job)
        return late

    # -- decisions -----------------------------------------------------------------------------

    def _bind_waiting(self, now: float) -> None:
        """Late binding: whoever's turn it is goes to the first engine with room."""
        while (job := self.waiting.peek()) is not None:
            engine = self._choose(job)
            if engine is None:
                return
            self.waiting.take(job)
            self.gate.left(job, now)
            self._send(job, engine, now)

    def _choose(self, job: Job) -> EngineSnapshot | None:
        """An engine that would run it at once; else one where it may push others aside."""

        binding = self._binding

        def fits(engine: EngineSnapshot) -> bool:
            return binding.fits(engine, job) and self.engines.suits(engine, job)

        drawn = [engine for engine in binding.drawn(self.engines) if fits(engine)]
        if drawn:
            return self._placement.choose(Candidates(drawn, self.engines, fits), job)
        return self._outranking(job)

    def _outranking(self, job: Job) -> EngineSnapshot | None:
        """The engine where the most blocks are held by lower priorities, if those are enough: its
        own scheduler preempts them, and relief finds them another place."""
        best: EngineSnapshot | None = None
        most = 0
        for engine in self.engines.draw():
            outranked = engine.outranked_blocks(job.priority)
            enough = outranked * engine.capacity.block_size >= job.tokens and not engine.unseen
            may = engine.can_hold(job.sequence_len) and self.engines.suits(engine, job)
            if enough and may and outranked > most:
                best, most = engine, outranked
        return best

    def _send(self, job: Job, engine: EngineSnapshot, now: float) -> None:
        number = self._courier.send(job, engine)
        job.begun = True
        job.weights = engine.weights
        engine.submitted(number, job.tokens)
        self.engines.changed(engine)
        self._placement.placed(engine, job)

    def _relieve(self, home: EngineSnapshot, waiting: Iterable[Waiting], now: float) -> None:
        for entry in self._relief.stuck(home, waiting):
            target = self._relief.target(home, entry, self.engines)
            if target is None:
                continue
            job = entry.job
            self._courier.take_back(job)
            job.moves += 1
            self.moved += 1
            self._send(job, target, now)

    def predicted_ttft_s(self, now: float) -> float:
        """Seconds to the first token of a newcomer as long as those who wait, or as a turn."""
        waiting = self.waiting
        tokens = waiting.tokens // len(waiting) if waiting else _TYPICAL_TOKENS
        newcomer = Job(tokens, tokens)
        return self.gate.wait_s(newcomer, waiting, now) + self._prefill_s(newcomer)

    def _prefill_s(self, job: Job) -> float:
        """Seconds to the first token at the quickest of some engines."""
        drawn = self.engines.draw()
        return min((engine.ttft_s(job.tokens) for engine in drawn), default=0.0)
