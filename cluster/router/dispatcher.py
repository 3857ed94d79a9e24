"""The router's middle: places token logs on engines, follows their frames, replays what is lost.

Runs in one asyncio loop; no locks, because nothing here awaits while it changes state.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from cluster.core.errors import (
    FieldViolation,
    HeadwayError,
    InvalidRequest,
    Overloaded,
    ResumedElsewhere,
    SequenceFailed,
    Unavailable,
    UnknownResumeToken,
)
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import LossCause, Refusal, ResumedFrom
from cluster.core.request import EngineRequest, check_fits
from cluster.fleet.dispatch import Fleet, FleetSettings
from cluster.fleet.job import Job
from cluster.fleet.placements.base import Placement
from cluster.fleet.relief import Waiting
from cluster.fleet.scaling import FleetDemand
from cluster.fleet.snapshot import EngineCapacity, EngineSnapshot
from cluster.fleet.token_log import SequenceGap
from cluster.hop.link import EngineLink, LinkListener, LinkSettings
from cluster.hop.messages import (
    RESUMED_ELSEWHERE,
    Abort,
    Adopted,
    Drain,
    Failure,
    Forget,
    Frame,
    Pause,
    Resume,
    Submit,
    Welcome,
)
from cluster.metrics.facts import RouterCounters, RouterFacts
from cluster.router.active import ActiveStream, Producer, StreamReader
from cluster.router.adoption import Adoptions, keep_of, request_of
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


class _Engine:
    """A connected engine and the streams placed on it, by stream id."""

    def __init__(self, link: EngineLink, welcome: Welcome) -> None:
        self.link = link
        self.welcome = welcome
        self.snapshot = EngineSnapshot(
            welcome.engine_id,
            EngineCapacity(
                welcome.max_sequence_len,
                welcome.model.block_size,
                welcome.model.num_blocks,
                welcome.max_num_seqs,
                welcome.max_num_batched_tokens,
            ),
            weights=welcome.model.weights,
        )
        self.streams: dict[int, ActiveStream] = {}
        self.next_stream = 1
        port = welcome.metrics_port
        self.metrics = f"{link.address[0]}:{port}" if port else ""


class Dispatcher:
    """Implements TokenSource, LinkListener and, for the fleet's decisions, Courier. Must be made
    inside its asyncio loop."""

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
        self._engines: dict[EngineLink, _Engine] = {}
        self._by_id: dict[str, _Engine] = {}
        self._active: set[ActiveStream] = set()
        self._of_job: dict[Job, ActiveStream] = {}
        self._kept: dict[str, ActiveStream] = {}
        """Streams that can be resumed, by token."""
        self._adoptions = Adoptions()
        self.counters = RouterCounters()
        self._told_preemptions: dict[Job, int] = {}
        """Of the streams that wait at the engine whose frame is being taken in."""
        self._model: ModelInfo | None = None
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
        if self._model is None and not self._unfit(model):
            self._model = model

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
        return self._model

    @property
    def active_streams(self) -> int:
        return len(self._active)

    def ready(self) -> bool:
        return len(self._engines) >= self.settings.min_engines and not self._closing

    def engines(self) -> list[EngineStatus]:
        now = time.monotonic()
        return [_status(engine, now) for engine in self._engines.values()]

    def scraped(self) -> list[tuple[str, str]]:
        """The engines' ids, and where each of them is scraped."""
        return [(engine.welcome.engine_id, engine.metrics) for engine in self._engines.values()]

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

    def drain(self, engine_id: str, undo: bool) -> int | None:
        engine = self._by_id.get(engine_id)
        if engine is None:
            return None
        engine.link.send(Drain(undo))
        return engine.snapshot.streams

    # -- streams -------------------------------------------------------------------------------

    async def open(self, request: GenerationRequest) -> StreamReader:
        if self._closing:
            raise Unavailable("the router is shutting down", Refusal.SHUTDOWN)
        if len(self._active) >= self.settings.max_streams:
            raise Overloaded(
                f"{len(self._active)} streams are in flight, the limit is "
                f"{self.settings.max_streams}; try again later",
                retry_after_s=1.0,
                reason=Refusal.STREAMS,
            )
        # Refused here, not at the engine: prompt and max_tokens are the caller's to change.
        engine_request = EngineRequest(
            request.prompt_ids,
            request.sampling,
            request.emitted_ids,
            priority=request.priority,
            tenant=request.tenant,
            ttft_objective_s=request.ttft_objective_s,
        )
        if self._engines:
            check_fits(
                engine_request, max(e.welcome.max_sequence_len for e in self._engines.values())
            )
        stream = self._new_stream(request)
        if request.resume_window_s > 0:
            self._keep(stream, secrets.token_urlsafe(24))
        try:
            self.fleet.offer(stream.job, stream.job.arrival_s)
        except Overloaded:
            self._give_up(stream)
            raise
        return stream.attach(len(request.emitted_ids))

    async def resume(self, token: str, next_index: int) -> Resumed:
        stream, origin = self._kept.get(token), ResumedFrom.HERE
        if stream is None:
            stream, origin = await self._adopt(token), ResumedFrom.ENGINE
        held = len(stream.log.emitted)
        if not 0 <= next_index <= held:
            raise InvalidRequest.single(
                "next_index", f"must be between 0 and {held}, what was produced; got {next_index}"
            )
        self.counters.resumes[origin] += 1
        emitted = tuple(stream.log.emitted[:next_index])
        request = dataclasses.replace(stream.request, emitted_ids=emitted)
        return Resumed(request, stream.attach(next_index))

    def forget(self, token: str) -> None:
        stream = self._kept.get(token)
        if stream is not None:
            self._give_up(stream)
        for engine in self._engines.values():
            engine.link.send(Forget(token))

    def _new_stream(self, request: GenerationRequest) -> ActiveStream:
        stream = ActiveStream(request, self._reader_left, self._reader_caught_up)
        stream.job.arrival_s = time.monotonic()
        self._active.add(stream)
        self._of_job[stream.job] = stream
        return stream

    def _keep(self, stream: ActiveStream, token: str) -> None:
        stream.resume_token = token
        self._kept[token] = stream

    async def _adopt(self, token: str) -> ActiveStream:
        """A stream that another router had, from the engine that produced it."""
        links = [engine.link for engine in self._engines.values()]
        found = await self._adoptions.ask(links, token)
        if token in self._kept:
            # Two calls asked at the same time; the engine's answer went to the first.
            return self._kept[token]
        if found is None or self._closing:
            raise UnknownResumeToken("no such stream is kept; it may have expired")
        stream = self._new_stream(request_of(found))
        self._keep(stream, token)
        output, stream.log.prompt_logprobs = found.scores
        if output:
            stream.log.logprobs[-len(output) :] = output
        if found.finish is not None:
            stream.log.finish = found.finish
            self._let_go(stream)
        else:
            stream.timing.replays += 1
            self.fleet.again(stream.job, time.monotonic())
        return stream

    # -- Courier -------------------------------------------------------------------------------

    def send(self, job: Job, engine: EngineSnapshot) -> int:
        stream, target = self._of_job[job], self._by_id[engine.engine_id]
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
        engine = self._engines.get(producer.link)
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

    def _give_up(self, stream: ActiveStream) -> None:
        """Nobody wants it any more, now or later."""
        stream.close()
        if stream.resume_token:
            self._kept.pop(stream.resume_token, None)
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
            for stream in list(self._kept.values()):
                if stream.expires_s is not None and now >= stream.expires_s:
                    self._give_up(stream)
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
        if not any(e.snapshot.can_hold(stream.job.sequence_len) for e in self._engines.values()):
            text = f"no engine that is large enough for this request came up {waited}"
            return Unavailable(text, Refusal.NO_ENGINE)
        return Overloaded(
            f"queued at the router: no engine had room {waited}; try again later",
            retry_after_s=limit / 10,
            reason=Refusal.QUEUE_TIMEOUT,
        )

    # -- LinkListener --------------------------------------------------------------------------

    def on_up(self, link: EngineLink, welcome: Welcome) -> None:
        problem = self._unfit(welcome.model)
        if problem:
            link.disconnect(f"engine {welcome.engine_id} is of no use here: {problem}")
            return
        if self._model is None or self._model.weights != welcome.model.weights:
            logger.info("the fleet now serves %s", welcome.model.name)
        engine = self._engines[link] = _Engine(link, welcome)
        self._by_id[welcome.engine_id] = engine
        longest = max(e.welcome.max_sequence_len for e in self._engines.values())
        self._model = dataclasses.replace(welcome.model, max_model_len=longest)
        logger.info("engine %s (epoch %d) is connected", welcome.engine_id, welcome.epoch)
        self.fleet.joined(engine.snapshot, time.monotonic())

    def _unfit(self, model: ModelInfo) -> str:
        """Why no stream of this router can run on an engine with this model; "" if it can. Other
        weights are fine, and are how a rolling update looks; another vocabulary is not."""
        tokenizer = self.settings.tokenizer
        if tokenizer and model.tokenizer and tokenizer != model.tokenizer:
            return f"{model.name} has another tokenizer than this router's model"
        ours = self._model
        if ours is not None and self._engines and ours.vocab_size != model.vocab_size:
            return (
                f"{model.name} has a vocabulary of {model.vocab_size}, "
                f"{ours.name} of {ours.vocab_size}"
            )
        return ""

    def on_frame(self, link: EngineLink, frame: Frame) -> None:
        engine = self._engines.get(link)
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
        for failure in frame.failures:
            self._take_failure(engine, failure)
        self._hear(engine, frame)

    def _hear(self, engine: _Engine, frame: Frame) -> None:
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

        if frame.draining != engine.snapshot.draining:
            self.fleet.drain(engine_id, undo=not frame.draining)

    def on_adopted(self, link: EngineLink, message: Adopted) -> None:
        self._adoptions.answered(message)

    def on_down(self, link: EngineLink, reason: str) -> None:
        engine = self._engines.pop(link, None)
        if engine is None:
            return
        engine_id = engine.welcome.engine_id
        self.counters.losses[link.lost_by] += 1
        logger.warning("engine %s is lost: %s", engine_id, reason)
        if self._by_id.get(engine_id) is engine:
            del self._by_id[engine_id]
            self.fleet.left(engine_id)
        for stream in list(engine.streams.values()):
            self._replay(stream, link.lost_by, f"engine {engine_id} is lost ({reason})")

    def _take_failure(self, engine: _Engine, failure: Failure) -> None:
        stream = engine.streams.pop(failure.stream, None)
        if stream is None:
            return
        if failure.reason == RESUMED_ELSEWHERE:
            self._fail(stream, ResumedElsewhere(failure.reason))
            self._give_up(stream)
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


def _status(engine: _Engine, now: float) -> EngineStatus:
    load = engine.snapshot.load
    host = engine.link.address[0]
    return EngineStatus(
        engine_id=engine.welcome.engine_id,
        address=f"{host}:{engine.link.address[1]}",
        epoch=engine.welcome.epoch,
        connected=engine.link.connected,
        blocks_total=load.blocks_total if load else 0,
        blocks_free=load.blocks_free if load else 0,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        step=load.step if load else 0,
        tokens_per_s=load.tokens_per_s if load else 0.0,
        preemptions=load.preemptions if load else 0,
        frame_age_s=now - engine.link.last_frame_s,
        draining=engine.snapshot.draining,
        step_s=load.step_s if load else 0.0,
        recomputed_tokens=load.recomputed_tokens if load else 0,
        metrics=engine.metrics,
    )
