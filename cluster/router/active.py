"""One request in flight at the router: its log, its readers, and where it is being produced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cluster.core.errors import HeadwayError, ResumedElsewhere, SlowReader
from cluster.core.outcome import FinishReason
from cluster.engine.core import StreamStats
from cluster.fleet.job import Job
from cluster.fleet.token_log import TokenLog
from cluster.hop.link import EngineLink
from cluster.hop.messages import Tokens
from cluster.router.stream import GenerationRequest, StreamTiming, TokenBatch

MAX_BATCH = 256
"""Tokens that a reader is given at once. A log that is read again may have 100,000, each with 21
log-probabilities: made into one message, they would hold the event loop, and others' tokens."""


class Producer:
    """The engine that works on a log right now: link, stream id there, and the log's epoch."""

    __slots__ = ("epoch", "link", "paused", "stream")

    def __init__(self, link: EngineLink, stream: int, epoch: int) -> None:
        self.link = link
        self.stream = stream
        self.epoch = epoch
        self.paused = False


class ActiveStream:
    """The log itself is the queue to the reader, so what is unread is bounded by the sequence's
    length, and by less once the producer is paused.

    on_left: called when the reader has left or the output was ended. on_reader: called when the
    number of unread tokens has gone down.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_left: Callable[[ActiveStream], None],
        on_reader: Callable[[ActiveStream], None],
    ) -> None:
        self.request = request
        self.log = TokenLog(request.prompt_ids, request.sampling, request.emitted_ids)
        self.job = Job(
            tokens=len(request.prompt_ids) + len(request.emitted_ids),
            sequence_len=len(request.prompt_ids) + request.sampling.max_tokens,
            tenant=request.tenant,
            priority=request.priority,
            session=request.session,
            prompt_ids=request.prompt_ids,
            ttft_objective_s=request.ttft_objective_s,
        )
        self.losses = 0
        """How often the engine that worked on it was lost."""
        self.timing = StreamTiming()
        self.producer: Producer | None = None
        self.slow_since_s: float | None = None
        self.resume_token = ""
        """Of its call, for the client; "" if it is not kept."""
        self.kept_as = ""
        """The token under which this choice of the call is kept, here and at its engine."""
        self.expires_s: float | None = None
        """When it is given up if nobody resumes it; None while somebody reads it."""
        self._on_left = on_left
        self._on_reader = on_reader
        self._opened_s = time.monotonic()
        self._placed_s: float | None = None
        self._delivered = len(request.emitted_ids)
        self._emit_time_s = 0.0
        self._error: HeadwayError | None = None
        self._closed = False
        self._reader = 0
        self._wake = asyncio.Event()

    @property
    def unread(self) -> int:
        return len(self.log.emitted) - self._delivered

    @property
    def over(self) -> bool:
        """Nothing more will be produced for it."""
        return self._closed or self._error is not None or self.log.finish is not None

    def place(self, producer: Producer, engine_id: str) -> None:
        """An engine takes the log over, from its next index on."""
        self.producer = producer
        self.timing.engine_ids.append(engine_id)
        # Once tokens have come, an engine has worked on it: no later one says how long it queued.
        self._placed_s = self._age() if not self.log.emitted else None

    def displaced(self, preemptions: int) -> None:
        """It leaves its engine unfinished, where it was preempted so often."""
        self.producer = None
        self.job.tokens = len(self.log.prompt_ids) + len(self.log.emitted)
        self.timing.replays += 1
        self.timing.preemptions += preemptions
        self.timing.recomputed_tokens += self.job.tokens

    # -- the producer's side -------------------------------------------------------------------

    def accept(self, part: Tokens, emit_time_s: float) -> None:
        """Take over a frame's tokens. Raises SequenceGap (see TokenLog.accept)."""
        if self.producer is None or self.over:
            return
        output, prompt = part.scores or ((), ())
        fresh = self.log.accept(
            self.producer.epoch, part.first_index, part.token_ids, part.finish, output, prompt
        )
        if fresh:
            self._emit_time_s = emit_time_s
            if self.timing.first_token_s is None:
                self.timing.first_token_s = self._age()
        if part.stats is not None:
            self._book(part.stats)
        if fresh or self.log.finish is not None:
            self._wake.set()

    def fail(self, error: HeadwayError) -> None:
        """End the stream with an error; tokens already in the log are still read first."""
        if not self.over:
            self._error = error
            self.timing.total_s = self._age()
            self._wake.set()

    def check_reader(self, now: float, limit_s: float) -> None:
        """Fail the stream if its reader has been too slow for too long. One that has left is waited
        for until the stream expires."""
        if (
            self.expires_s is None
            and self.slow_since_s is not None
            and now - self.slow_since_s > limit_s
        ):
            self.fail(
                SlowReader(
                    f"the client left {self.unread} tokens unread for {limit_s:.0f} s; "
                    "read the stream faster or ask for fewer tokens"
                )
            )

    def _book(self, stats: StreamStats) -> None:
        if self._placed_s is not None:
            self.timing.queue_s = self._placed_s + stats.queue_s
        self.timing.preemptions += stats.preemptions
        self.timing.recomputed_tokens += stats.recomputed_tokens
        self.timing.total_s = self._age()

    def _age(self) -> float:
        return time.monotonic() - self._opened_s

    # -- the readers' side ---------------------------------------------------------------------

    def attach(self, next_index: int) -> StreamReader:
        """A reader from output token `next_index` on; the one before it reads no further."""
        self._reader += 1
        self._delivered = next_index
        self.expires_s = None
        self._wake.set()
        return StreamReader(self, self._reader)

    async def next(self, reader: int) -> TokenBatch:
        while True:
            if reader != self._reader:
                raise ResumedElsewhere("the stream was resumed by another call")
            if self.unread or self.log.finish is not None:
                return self._take()
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()

    def leave(self, reader: int) -> None:
        if reader == self._reader and not self._closed and self.expires_s is None:
            if self.resume_token:
                self.expires_s = time.monotonic() + self.request.resume_window_s
            else:
                self._closed = True
            self._on_left(self)

    def end(self, reader: int) -> None:
        if reader == self._reader and not self.over:
            self.log.finish = FinishReason.STOP
            self.timing.total_s = self._age()
            self._on_left(self)

    def close(self) -> None:
        """Nobody will read it any more."""
        self._closed = True
        self._wake.set()

    def _take(self) -> TokenBatch:
        first = self._delivered
        ids = self.log.emitted[first : first + MAX_BATCH]
        self._delivered += len(ids)
        finish: FinishReason | None = None if self.unread else self.log.finish
        self._on_reader(self)
        return TokenBatch(
            first,
            ids,
            self._emit_time_s,
            finish,
            self.log.logprobs[first : first + len(ids)],
            self.log.prompt_logprobs if first == 0 and ids else (),
        )


class StreamReader:
    """Implements TokenStream for one of a stream's readers, of which the newest counts."""

    def __init__(self, stream: ActiveStream, number: int) -> None:
        self.stream = stream
        self._number = number

    @property
    def timing(self) -> StreamTiming:
        return self.stream.timing

    @property
    def resume_token(self) -> str:
        return self.stream.resume_token

    @property
    def log(self) -> TokenLog:
        return self.stream.log

    async def next(self) -> TokenBatch:
        return await self.stream.next(self._number)

    def leave(self) -> None:
        self.stream.leave(self._number)

    def end(self) -> None:
        self.stream.end(self._number)
