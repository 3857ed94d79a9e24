"""The router's middle: places token logs on engines, follows their frames, replays what is lost.

Runs in one asyncio loop; no locks, because nothing here awaits while it changes state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cluster.core.errors import (
    FieldViolation,
    HeadwayError,
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    ResumedElsewhere,
    SequenceFailed,
    Unavailable,
    UnknownResumeToken,
)
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import DrainOrder, LossCause, Refusal, ResumedFrom
from cluster.core.request import EngineRequest, check_fits
from cluster.fleet.dispatch import Fleet, FleetSettings
from cluster.fleet.job import Job
from cluster.fleet.placements.base import Placement
from cluster.fleet.relief import Waiting
from cluster.fleet.scaling import FleetDemand
from cluster.fleet.snapshot import EngineSnapshot
from cluster.fleet.token_log import SequenceGap
from cluster.hop.link import EngineLink, LinkListener, LinkSettings
from cluster.hop.messages import (
    EMPTIED,
    RESUMED_ELSEWHERE,
    Abort,
    Adopted,
    Drain,
    Failure,
    Frame,
    KeptLog,
    Pause,
    Resume,
    Submit,
    Welcome,
)
from cluster.metrics.facts import RouterCounters, RouterFacts
from cluster.router.active import ActiveStream, Producer, StreamReader
from cluster.router.adoption import keep_of
from cluster.router.engines import ConnectedEngine, ConnectedEngines
from cluster.router.kept import KeptStreams, tokens_of
from cluster.router.stream import EngineStatus, GenerationRequest, Resumed

logger = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[tuple[str, int], LinkSettings, LinkListener], EngineLink]


@dataclass(frozen=True, slots=True)
class DispatcherSettings:
    """max_streams: streams in flight at most; more are refused as overload.
    fleet: gate (how long a stream may wait for an engine, among others) and relief.
    unread_limit: tokens a reader may leave unread before its sequence is paused, and
    slow_reader_s: how long it may stay so before the stream is ended.
    max_replays: moves to another engine at most, so that a request that kills engines ends.
    tokenizer: see tokenizer_digest(); engines with another one are not taken, "" takes any.
    min_engines: fewer, and this router is not ready; 0 where the first request starts one.
    """

    max_streams: int = 1024
    fleet: FleetSettings = field(default_factory=FleetSettings)
    unread_limit: int = 512
    slow_reader_s: float = 30.0
    max_replays: int = 8
    tokenizer: str = ""
    min_engines: int = 1


class Dispatcher:
    """Implements TokenSource, LinkListener, Home of kept streams and, for the fleet's decisions,
    Courier. Must be made inside its asyncio loop."""

    def __init__(
        self,
        link_settings: LinkSettings,
        settings: DispatcherSettings | None = None,
        placement: Placement | None = None,
        connect: Connect = EngineLink,
    ) -> None:
        """connect: makes the connection to an engine; tests put another network here."""
        self.settings = settings or DispatcherSettings()
        self._link_settings = link_settings
        self._connect = connect
        self.fleet = Fleet(self, placement, self.settings.fleet)
        self._links: dict[tuple[str, int], EngineLink] = {}
        self._engines = ConnectedEngines(self.settings.tokenizer)
        self._active: set[ActiveStream] = set()
        self._of_job: dict[Job, ActiveStream] = {}
        self.counters = RouterCounters()
        self._kept = KeptStreams(self, self._count_resumed)
        self._told_preemptions: dict[Job, int] = {}
        """Of the streams that wait at the engine whose frame is being taken in."""
        self._closing = False
        self._watch = asyncio.create_task(self._watch_streams())

    # -- the fleet -----------------------------------------------------------------------------

    async def set_engines(self, addresses: set[tuple[str, int]]) -> None:
        """Connect to these engines. One that is no longer listed is let go of only once its
        connection is down: a coordinator that restarts with an empty list must not end streams."""
        for address in addresses - self._links.keys():
            self._links[address] = self._connect(address, self._link_settings, self)
        for address in self._links.keys() - addresses:
            if not self._links[address].connected:
                await self._links.pop(address).close()

    def expect(self, model: ModelInfo) -> None:
        """What the fleet serves, for requests that come before the first engine does."""
        self._engines.expect(model)

    def demand(self) -> FleetDemand:
        """What waits here, for whoever decides how many engines there should be."""
        waiting = self.fleet.waiting
        ttft_s = self.fleet.predicted_ttft_s(time.monotonic())
        return FleetDemand(len(waiting), waiting.tokens, ttft_s)

    def end_streams(self) -> None:
        """End every stream with Unavailable and take no more. The engines keep those that can be
        resumed: no Abort goes out for them, their connection just ends."""
        self._closing = True
        for stream in list(self._active):
            error = Unavailable(
                "the router is shutting down; ask again elsewhere", Refusal.SHUTDOWN
            )
            if stream.resume_token:
                stream.fail(error)
            else:
                self._fail(stream, error)

    async def close(self) -> None:
        """End every stream and let the engines go."""
        self.end_streams()
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        for link in self._links.values():
            await link.close()
        self._links.clear()

    @property
    def model(self) -> ModelInfo | None:
        return self._engines.model

    @property
    def active_streams(self) -> int:
        return len(self._active)

    def ready(self) -> bool:
        return len(self._engines) >= self.settings.min_engines and not self._closing

    def engines(self) -> list[EngineStatus]:
        now = time.monotonic()
        return [engine.status(now) for engine in self._engines]

    def scraped(self) -> list[tuple[str, str]]:
        """The engines' ids, and where each of them is scraped."""
        return [(engine.welcome.engine_id, engine.metrics) for engine in self._engines]

    def facts(self) -> RouterFacts:
        waiting = self.fleet.waiting
        return RouterFacts(
            streams=len(self._active),
            queued=len(waiting),
            queued_tokens=waiting.tokens,
            relief_moves=self.fleet.moved,
            engines=len(self._engines),
            draining=sum(engine.draining for engine in self.fleet.engines),
            counters=self.counters,
        )

    def drain(self, engine_id: str, order: DrainOrder) -> int | None:
        engine = self._engines.named(engine_id)
        if engine is None:
            return None
        engine.link.send(Drain(order))
        return engine.snapshot.streams

    # -- streams -------------------------------------------------------------------------------

    async def open(self, request: GenerationRequest) -> StreamReader:
        """One that is a call of its own."""
        return (await self.open_all([request]))[0]

    async def open_all(self, requests: Sequence[GenerationRequest]) -> list[StreamReader]:
        if self._closing:
            raise Unavailable("the router is shutting down", Refusal.SHUTDOWN)
        if len(self._active) + len(requests) > self.settings.max_streams:
            more = f" and {len(requests)} more are asked for" if len(requests) > 1 else ""
            raise Overloaded(
                f"{len(self._active)} streams are in flight{more}, the limit is "
                f"{self.settings.max_streams}; try again later",
                retry_after_s=1.0,
                reason=Refusal.STREAMS,
            )
        for request in requests:
            self._check(request)
        streams = [self.begin(request) for request in requests]
        if requests[0].resume_window_s > 0:
            self._kept.keep(streams)
        try:
            for stream in streams:
                self.fleet.offer(stream.job, stream.job.arrival_s)
        except Overloaded:
            # All or none: those that have a place already give it back.
            for stream in streams:
                self.give_up(stream)
            raise
        return [stream.attach(len(stream.request.emitted_ids)) for stream in streams]

    def _check(self, request: GenerationRequest) -> None:
        """Refused here, not at the engine: prompt and max_tokens are the caller's to change."""
        engine_request = EngineRequest(
            request.prompt_ids,
            request.sampling,
            request.emitted_ids,
            priority=request.priority,
            tenant=request.tenant,
            ttft_objective_s=request.ttft_objective_s,
        )
        if self._engines:
            check_fits(engine_request, self._engines.longest)

    async def resume(self, token: str, next_index: int) -> Resumed:
        """One that is a call of its own."""
        return (await self.resume_all(token, {0: next_index}))[0]

    async def resume_all(self, token: str, positions: Mapping[int, int]) -> list[Resumed]:
        resumed = [] if self._closing else await self._kept.resume(token, positions)
        if self._closing:
            raise Unavailable("the router is shutting down", Refusal.SHUTDOWN)
        return resumed

    def forget(self, token: str) -> None:
        try:
            kept_as = tokens_of(token).values()
        except UnknownResumeToken:
            return
        for stream in self._kept.of(token):
            self.give_up(stream)
        for one in kept_as:
            self._engines.forget(one)

    # -- Home ----------------------------------------------------------------------------------

    def begin(self, request: GenerationRequest) -> ActiveStream:
        stream = ActiveStream(request, self._reader_left, self._reader_caught_up)
        stream.job.arrival_s = time.monotonic()
        self._active.add(stream)
        self._of_job[stream.job] = stream
        return stream

    def go_on(self, stream: ActiveStream, log: KeptLog) -> None:
        output, stream.log.prompt_logprobs = log.scores
        if output:
            stream.log.logprobs[-len(output) :] = output
        if log.finish is not None:
            stream.log.finish = log.finish
            self._let_go(stream)
        else:
            stream.timing.replays += 1
            self.fleet.again(stream.job, time.monotonic())

    def give_up(self, stream: ActiveStream) -> None:
        stream.close()
        self._kept.drop(stream)
        self._let_go(stream)

    def links(self) -> list[EngineLink]:
        return [engine.link for engine in self._engines]

    def _count_resumed(self, origin: ResumedFrom) -> None:
        self.counters.resumes[origin] += 1

    # -- Courier -------------------------------------------------------------------------------

    def send(self, job: Job, engine: EngineSnapshot) -> int:
        stream, target = self._of_job[job], self._engines.named(engine.engine_id)
        if target is None:
            raise InvariantViolation(f"engine {engine.engine_id} was chosen but is not connected")
        number = target.next_stream
        target.next_stream += 1
        if job.begun and job.weights != engine.weights:
            logger.info(
                "request %s goes on with other weights, from token %d: no engine has its own",
                stream.request.request_id,
                len(stream.log.emitted),
                extra={"request_id": stream.request.request_id},
            )
        producer = Producer(target.link, number, stream.log.open_epoch())
        stream.place(producer, engine.engine_id)
        target.streams[number] = stream
        target.link.send(_submit(number, stream))
        return number

    def take_back(self, job: Job) -> None:
        stream = self._of_job[job]
        self._abort(stream)
        stream.displaced(self._told_preemptions.get(job, 0))
        self.counters.replayed_tokens += job.tokens
        logger.info(
            "request %s moves to another engine at token %d: its own is out of blocks",
            stream.request.request_id,
            len(stream.log.emitted),
            extra={"request_id": stream.request.request_id},
        )

    def _abort(self, stream: ActiveStream) -> None:
        """Free what the stream holds at its engine. Idempotent."""
        producer, stream.producer = stream.producer, None
        if producer is None:
            return
        engine = self._engines.of(producer.link)
        if engine is not None and engine.streams.pop(producer.stream, None) is not None:
            producer.link.send(Abort(producer.stream))

    def _replay(self, stream: ActiveStream, cause: LossCause, reason: str) -> None:
        """Continue the log on another engine (or the same one, if it is back)."""
        if stream.over:
            return
        if stream.losses >= self.settings.max_replays:
            text = f"gave up after {stream.losses} lost engines: {reason}"
            self._fail(stream, Unavailable(text, Refusal.ENGINES_LOST))
            return
        stream.losses += 1
        stream.displaced(0)
        self.counters.replays[cause] += 1
        self.counters.replayed_tokens += stream.job.tokens
        logger.info(
            "request %s is replayed from token %d: %s",
            stream.request.request_id,
            len(stream.log.emitted),
            reason,
            extra={"request_id": stream.request.request_id},
        )
        self.fleet.again(stream.job, time.monotonic())

    def _fail(self, stream: ActiveStream, error: HeadwayError) -> None:
        stream.fail(error)
        self._let_go(stream)

    def _let_go(self, stream: ActiveStream) -> None:
        """Free what the stream holds at its engine and here. Idempotent."""
        self._active.discard(stream)
        self._of_job.pop(stream.job, None)
        self.fleet.drop(stream.job)
        self._abort(stream)

    # -- readers -------------------------------------------------------------------------------

    def _reader_left(self, stream: ActiveStream) -> None:
        if stream.over:
            self._let_go(stream)

    def _reader_caught_up(self, stream: ActiveStream) -> None:
        stream.slow_since_s = None
        producer = stream.producer
        if producer is not None and producer.paused:
            producer.paused = False
            producer.link.send(Resume(producer.stream))

    def _pause_if_slow(self, stream: ActiveStream) -> None:
        producer = stream.producer
        if producer is None or producer.paused or stream.unread <= self.settings.unread_limit:
            return
        producer.paused = True
        stream.slow_since_s = time.monotonic()
        producer.link.send(Pause(producer.stream))

    async def _watch_streams(self) -> None:
        """Ends streams that wait too long: for an engine, or for their reader."""
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for stream in self._kept.expired(now):
                self.give_up(stream)
            for job in self.fleet.overdue(now):
                stream = self._of_job[job]
                self._fail(stream, self._why_overdue(stream))
            for stream in list(self._active):
                if stream.slow_since_s is not None:
                    stream.check_reader(now, self.settings.slow_reader_s)
                    if stream.over:
                        self._let_go(stream)

    def _why_overdue(self, stream: ActiveStream) -> HeadwayError:
        limit = self.fleet.gate.patience_s(stream.job)
        waited = f"within {limit:g} s"
        if not self._engines:
            text = f"no engine came up {waited}; see `headway status`"
            return Unavailable(text, Refusal.NO_ENGINE)
        if not self._engines.can_hold(stream.job.sequence_len):
            text = f"no engine that is large enough for this request came up {waited}"
            return Unavailable(text, Refusal.NO_ENGINE)
        return Overloaded(
            f"queued at the router: no engine had room {waited}; try again later",
            retry_after_s=limit / 10,
            reason=Refusal.QUEUE_TIMEOUT,
        )

    # -- LinkListener --------------------------------------------------------------------------

    def on_up(self, link: EngineLink, welcome: Welcome) -> None:
        problem = self._engines.unfit(welcome.model)
        if problem:
            link.disconnect(f"engine {welcome.engine_id} is of no use here: {problem}")
            return
        engine = self._engines.add(link, welcome)
        logger.info("engine %s (epoch %d) is connected", welcome.engine_id, welcome.epoch)
        self.fleet.joined(engine.snapshot, time.monotonic())

    def on_frame(self, link: EngineLink, frame: Frame) -> None:
        engine = self._engines.of(link)
        if engine is None:
            return
        if frame.epoch != engine.welcome.epoch:
            link.disconnect(f"frame of epoch {frame.epoch}, welcome of {engine.welcome.epoch}")
            return
        try:
            for part in frame.tokens:
                stream = engine.streams.get(part.stream)
                if stream is None:
                    continue
                stream.accept(part, frame.emit_s)
                if stream.log.finish is not None:
                    del engine.streams[part.stream]
                    self._let_go(stream)
                else:
                    self._pause_if_slow(stream)
        except SequenceGap as gap:
            link.disconnect(str(gap))
            return
        # Before anything is sent anywhere because of this frame.
        if frame.draining != engine.snapshot.draining:
            self.fleet.drain(engine.welcome.engine_id, undo=not frame.draining)
        for failure in frame.failures:
            self._take_failure(engine, failure)
        self._hear(engine, frame)

    def _hear(self, engine: ConnectedEngine, frame: Frame) -> None:
        """What the frame says of the engine's load, and who of ours waits there."""
        waiting: list[Waiting] = []
        for part in frame.waiting:
            stream = engine.streams.get(part.stream)
            if stream is not None:
                waiting.append(Waiting(stream.job, part.tokens))
                self._told_preemptions[stream.job] = part.preemptions
        engine_id = engine.welcome.engine_id
        self.fleet.heard(engine_id, frame.load, frame.seen, waiting, time.monotonic())
        self._told_preemptions.clear()

    def on_adopted(self, link: EngineLink, message: Adopted) -> None:
        self._kept.answered(message)

    def on_down(self, link: EngineLink, reason: str) -> None:
        engine = self._engines.remove(link)
        if engine is None:
            return
        engine_id = engine.welcome.engine_id
        self.counters.losses[link.lost_by] += 1
        logger.warning("engine %s is lost: %s", engine_id, reason)
        if self._engines.unname(engine):
            self.fleet.left(engine_id)
        for stream in list(engine.streams.values()):
            self._replay(stream, link.lost_by, f"engine {engine_id} is lost ({reason})")

    def _take_failure(self, engine: ConnectedEngine, failure: Failure) -> None:
        stream = engine.streams.pop(failure.stream, None)
        if stream is None:
            return
        if failure.reason == EMPTIED:
            self._replay(stream, LossCause.EMPTIED, f"{engine.welcome.engine_id}: {EMPTIED}")
        elif failure.reason == RESUMED_ELSEWHERE:
            self._fail(stream, ResumedElsewhere(failure.reason))
            self.give_up(stream)
        elif failure.invalid:
            violations = [FieldViolation(f, d) for f, d in failure.invalid]
            self._fail(stream, InvalidRequest(violations))
        else:
            self._fail(stream, SequenceFailed(failure.reason))


def _submit(number: int, stream: ActiveStream) -> Submit:
    request, log = stream.request, stream.log
    return Submit(
        number,
        list(log.prompt_ids),
        log.emitted[:],
        log.sampling,
        tenant=request.tenant,
        priority=request.priority,
        ttft_objective_s=request.ttft_objective_s,
        keep=keep_of(stream),
    )
