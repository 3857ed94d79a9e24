"""The router's middle: places token logs on engines, follows their frames, replays what is lost.

Runs in one asyncio loop; no locks, because nothing here awaits while it changes state.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from dataclasses import dataclass

from cluster.core.errors import (
    FieldViolation,
    HeadwayError,
    InvalidRequest,
    Overloaded,
    SequenceFailed,
    Unavailable,
)
from cluster.core.modelinfo import ModelInfo
from cluster.core.request import EngineRequest, check_fits
from cluster.fleet.placement import LeastLoaded, Placement
from cluster.fleet.snapshot import EngineSnapshot
from cluster.fleet.token_log import SequenceGap
from cluster.hop.link import EngineLink, LinkSettings
from cluster.hop.messages import Abort, Failure, Frame, Pause, Resume, Submit, Welcome
from cluster.router.active import ActiveStream, Producer
from cluster.router.stream import EngineStatus, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatcherSettings:
    """max_streams: streams in flight at most; more are refused as overload.
    engine_wait_s: how long a stream waits for an engine to appear (start, restart) before it fails.
    unread_limit: tokens a reader may leave unread before its sequence is paused, and
    slow_reader_s: how long it may stay so before the stream is ended.
    max_replays: moves to another engine at most, so that a request that kills engines ends.
    """

    max_streams: int = 1024
    engine_wait_s: float = 60.0
    unread_limit: int = 512
    slow_reader_s: float = 30.0
    max_replays: int = 8


class _Engine:
    """A connected engine and the streams placed on it, by stream id."""

    def __init__(self, link: EngineLink, welcome: Welcome) -> None:
        self.link = link
        self.welcome = welcome
        self.snapshot = EngineSnapshot(welcome.engine_id, welcome.max_sequence_len)
        self.streams: dict[int, ActiveStream] = {}
        self.next_stream = 1


class Dispatcher:
    """Implements TokenSource and LinkListener. Must be made inside its asyncio loop."""

    def __init__(
        self,
        link_settings: LinkSettings,
        settings: DispatcherSettings | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.settings = settings or DispatcherSettings()
        self._link_settings = link_settings
        self._placement = placement or LeastLoaded()
        self._links: dict[tuple[str, int], EngineLink] = {}
        self._engines: dict[EngineLink, _Engine] = {}
        self._active: set[ActiveStream] = set()
        self._parked: dict[ActiveStream, float] = {}
        """Streams without an engine, with the monotonic time at which they give up."""
        self._model: ModelInfo | None = None
        self._closing = False
        self._watch = asyncio.create_task(self._watch_streams())

    # -- the fleet -----------------------------------------------------------------------------

    async def set_engines(self, addresses: set[tuple[str, int]]) -> None:
        """Connect to these engines. One that is no longer listed is let go of only once its
        connection is down: a coordinator that restarts with an empty list must not end streams."""
        for address in addresses - self._links.keys():
            self._links[address] = EngineLink(address, self._link_settings, self)
        for address in self._links.keys() - addresses:
            if not self._links[address].connected:
                await self._links.pop(address).close()

    def end_streams(self) -> None:
        """End every stream with Unavailable and take no more."""
        self._closing = True
        for stream in list(self._active):
            self._fail(stream, Unavailable("the router is shutting down; ask again elsewhere"))

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
        return bool(self._engines) and not self._closing

    def engines(self) -> list[EngineStatus]:
        now = time.monotonic()
        return [_status(engine, now) for engine in self._engines.values()]

    # -- streams -------------------------------------------------------------------------------

    async def open(self, request: GenerationRequest) -> ActiveStream:
        if self._closing:
            raise Unavailable("the router is shutting down")
        if len(self._active) >= self.settings.max_streams:
            raise Overloaded(
                f"{len(self._active)} streams are in flight, the limit is "
                f"{self.settings.max_streams}; try again later",
                retry_after_s=1.0,
            )
        # Refused here, not at the engine: prompt and max_tokens are the caller's to change.
        engine_request = EngineRequest(
            request.prompt_ids,
            request.sampling,
            priority=request.priority,
            tenant=request.tenant,
            ttft_objective_s=request.ttft_objective_s,
        )
        if self._engines:
            check_fits(
                engine_request, max(e.welcome.max_sequence_len for e in self._engines.values())
            )
        stream = ActiveStream(request, self._reader_left, self._reader_caught_up)
        self._active.add(stream)
        self._place(stream)
        return stream

    def _place(self, stream: ActiveStream) -> None:
        """Give the log to the best engine; park it when there is none."""
        by_snapshot = {id(e.snapshot): e for e in self._engines.values()}
        chosen = self._placement.choose(
            (e.snapshot for e in self._engines.values()), stream.sequence_len
        )
        if chosen is None:
            stream.producer = None
            self._parked[stream] = time.monotonic() + self.settings.engine_wait_s
            return
        engine = by_snapshot[id(chosen)]
        number = engine.next_stream
        engine.next_stream += 1
        stream.place(Producer(engine.link, number, stream.log.open_epoch()))
        engine.streams[number] = stream
        chosen.submitted(number, len(stream.log.prompt_ids) + len(stream.log.emitted))
        engine.link.send(_submit(number, stream))

    def _replay(self, stream: ActiveStream, reason: str) -> None:
        """Continue the log on another engine (or the same one, if it is back)."""
        if stream.over:
            return
        if stream.timing.replays >= self.settings.max_replays:
            self._fail(
                stream, Unavailable(f"gave up after {stream.timing.replays} moves: {reason}")
            )
            return
        stream.timing.replays += 1
        logger.info(
            "request %s is replayed from token %d: %s",
            stream.request.request_id,
            len(stream.log.emitted),
            reason,
        )
        self._place(stream)

    def _fail(self, stream: ActiveStream, error: HeadwayError) -> None:
        stream.fail(error)
        self._let_go(stream)

    def _let_go(self, stream: ActiveStream) -> None:
        """Free what the stream holds at its engine and here. Idempotent."""
        self._active.discard(stream)
        self._parked.pop(stream, None)
        producer, stream.producer = stream.producer, None
        if producer is None:
            return
        engine = self._engines.get(producer.link)
        if engine is not None and engine.streams.pop(producer.stream, None) is not None:
            producer.link.send(Abort(producer.stream))

    # -- readers -------------------------------------------------------------------------------

    def _reader_left(self, stream: ActiveStream) -> None:
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
            for stream, gives_up_s in list(self._parked.items()):
                if now >= gives_up_s:
                    self._fail(stream, Unavailable(self._no_engine_reason()))
            for stream in list(self._active):
                if stream.slow_since_s is not None:
                    stream.check_reader(now, self.settings.slow_reader_s)
                    if stream.over:
                        self._let_go(stream)

    def _no_engine_reason(self) -> str:
        waited = f"within {self.settings.engine_wait_s:.0f} s"
        if self._engines:
            return f"no engine that is large enough for this request came up {waited}"
        return f"no engine came up {waited}; see `headway status`"

    # -- LinkListener --------------------------------------------------------------------------

    def on_up(self, link: EngineLink, welcome: Welcome) -> None:
        if self._model is not None and self._model.fingerprint != welcome.model.fingerprint:
            if self._engines:
                link.disconnect(
                    f"engine {welcome.engine_id} serves another model "
                    f"({welcome.model.name}) than this fleet ({self._model.name})"
                )
                return
            logger.info("the fleet now serves %s", welcome.model.name)
        self._engines[link] = _Engine(link, welcome)
        longest = max(e.welcome.max_sequence_len for e in self._engines.values())
        self._model = dataclasses.replace(welcome.model, max_model_len=longest)
        logger.info("engine %s (epoch %d) is connected", welcome.engine_id, welcome.epoch)
        waiting, self._parked = list(self._parked), {}
        for stream in waiting:
            self._place(stream)

    def on_frame(self, link: EngineLink, frame: Frame) -> None:
        engine = self._engines.get(link)
        if engine is None:
            return
        if frame.epoch != engine.welcome.epoch:
            link.disconnect(f"frame of epoch {frame.epoch}, welcome of {engine.welcome.epoch}")
            return
        engine.snapshot.updated(frame.load, frame.seen)
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

    def on_down(self, link: EngineLink, reason: str) -> None:
        engine = self._engines.pop(link, None)
        if engine is None:
            return
        logger.warning("engine %s is lost: %s", engine.welcome.engine_id, reason)
        for stream in list(engine.streams.values()):
            self._replay(stream, f"engine {engine.welcome.engine_id} is lost ({reason})")

    def _take_failure(self, engine: _Engine, failure: Failure) -> None:
        stream = engine.streams.pop(failure.stream, None)
        if stream is None:
            return
        if failure.invalid:
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
    )


def _status(engine: _Engine, now: float) -> EngineStatus:
    load = engine.snapshot.load
    host, port = engine.link.address
    return EngineStatus(
        engine_id=engine.welcome.engine_id,
        address=f"{host}:{port}",
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
    )
