"""An engine without threads or sockets: streams in, plans out, results in, reports out.

The thread in engine.loop drives it in real time, the simulator in virtual time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, TypeAlias

from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId, TokenId
from cluster.core.invariants import check_idle
from cluster.core.load import EngineLoad
from cluster.core.outcome import FinishReason
from cluster.core.plan import StepPlan, StepResult, TokenLogprob
from cluster.core.request import EngineRequest
from cluster.core.scheduler import Scheduler
from cluster.core.sequence import Sequence
from cluster.engine.rate import RateMeter

ConnectionId: TypeAlias = int
"""Which router; numbered by the engine's hop server."""


class StreamKey(NamedTuple):
    """A stream as an engine knows it: the router's connection and the router's number in it."""

    connection: ConnectionId
    stream: int


class StreamStats(NamedTuple):
    """What a finished stream cost. queue_s: from arrival to the first step that worked on it.
    stalled_s: from each preemption to the step that took it up again, summed."""

    queue_s: float
    preemptions: int
    recomputed_tokens: int
    stalled_s: float


class StreamTokens(NamedTuple):
    """Tokens of one stream in one step; stats come with the finish."""

    key: StreamKey
    first_index: int
    token_ids: list[TokenId]
    finish: FinishReason | None
    stats: StreamStats | None


class StreamFailure(NamedTuple):
    """A stream that ends without a finish. invalid: (field, description) pairs when the request
    itself was refused, empty when the engine failed it."""

    key: StreamKey
    reason: str
    invalid: list[tuple[str, str]]


class Scores(NamedTuple):
    """Log-probabilities that a stream asked for: of the step's output tokens, and, with the first
    of them, of the prompt's from the second on."""

    output: list[TokenLogprob]
    prompt: list[TokenLogprob]


class WaitingStream(NamedTuple):
    """A stream that has no blocks at present. tokens: to be computed before its next one, prompt
    and emitted ones. preemptions, recomputed_tokens: as in StreamStats, so far. stalled_s: since it
    could have gone on, with what it was stalled before; 0 for one that has not begun."""

    key: StreamKey
    tokens: int
    preemptions: int
    recomputed_tokens: int
    stalled_s: float


@dataclass(slots=True)
class StepReport:
    """All that a step (or a refusal between steps) has to tell the routers. waiting: the first of
    those who wait, in the order in which they would come in; routers may take them elsewhere."""

    load: EngineLoad
    tokens: list[StreamTokens]
    failures: list[StreamFailure]
    waiting: list[WaitingStream] = field(default_factory=list)
    scores: dict[StreamKey, Scores] = field(default_factory=dict)


MAX_WAITING_TOLD = 32
"""Of those who wait; who stands further back is told of when it has moved up."""
SURVEY_PERIOD_S = 0.05
_SMOOTHING = 0.2
"""Weight of the newest step in step_s."""


class _Survey(NamedTuple):
    """Facts that take a look at every running sequence. at_s: when; running: how many there were.
    room, prefill_tokens, held: as in EngineLoad."""

    at_s: float
    running: int
    room: int
    prefill_tokens: int
    held: tuple[tuple[int, int], ...]


class EngineCore:
    """Maps streams to sequences and steps the scheduler. Owned by one thread.

    survey_period_s: how often room, prefill tokens and blocks held by priority are worked out anew
    at most; infinite for callers that do not look at them.
    """

    def __init__(self, scheduler: Scheduler, survey_period_s: float = SURVEY_PERIOD_S) -> None:
        self.scheduler = scheduler
        self._survey_period_s = survey_period_s
        self._survey = _Survey(-math.inf, 0, 0, 0, ())
        self._step_s = 0.0
        self._streams: dict[StreamKey, SequenceId] = {}
        self._keys: dict[SequenceId, StreamKey] = {}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._rate = RateMeter()
        self._books_checked = False

    # -- commands ------------------------------------------------------------------------------

    def submit(self, key: StreamKey, request: EngineRequest, now: float) -> StreamFailure | None:
        """Queue a stream's request; a refusal if it can never fit."""
        try:
            sequence = self.scheduler.add(request, now)
        except InvalidRequest as error:
            invalid = [(v.field, v.description) for v in error.violations]
            return StreamFailure(key, str(error), invalid)
        self._streams[key] = sequence.seq_id
        self._keys[sequence.seq_id] = key
        self._sequences[sequence.seq_id] = sequence
        return None

    def abort(self, key: StreamKey) -> None:
        """Idempotent; unknown streams (finished meanwhile) are passed over."""
        seq_id = self._streams.get(key)
        if seq_id is not None:
            self.scheduler.abort(seq_id)
            self._forget(seq_id)

    def pause(self, key: StreamKey) -> None:
        if (seq_id := self._streams.get(key)) is not None:
            self.scheduler.pause(seq_id)

    def resume(self, key: StreamKey) -> None:
        if (seq_id := self._streams.get(key)) is not None:
            self.scheduler.resume(seq_id)

    def drop_connection(self, connection: ConnectionId) -> None:
        """A router is gone: nobody will read its streams."""
        for key in [k for k in self._streams if k.connection == connection]:
            self.abort(key)

    def give_away(self, reason: str) -> list[StreamFailure]:
        """Abort all streams: what to say of each."""
        failures = [StreamFailure(key, reason, []) for key in self._streams]
        for failure in failures:
            self.abort(failure.key)
        return failures

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(self, now: float) -> StepPlan | None:
        """The next plan; None when there is nothing to run. Each time the engine falls idle, the
        books are checked."""
        plan = self.scheduler.plan(now)
        if plan is not None:
            self._books_checked = False
        elif self._idle() and not self._books_checked:
            check_idle(self.scheduler)
            self._books_checked = True
        return plan

    def _idle(self) -> bool:
        return len(self.scheduler) == 0 and self.scheduler.in_flight is None

    @property
    def next_wake_s(self) -> float | None:
        """When begin_step() is worth calling again, if no command comes before."""
        return self.scheduler.next_wake_s

    def complete_step(self, result: StepResult, now: float) -> StepReport:
        committed = self.scheduler.commit(result)
        # Before finished streams are forgotten.
        output, prompts = committed.logprobs, committed.prompt_logprobs
        scores = {
            self._keys[seq_id]: Scores(
                [output[seq_id]] if seq_id in output else [], prompts.get(seq_id, [])
            )
            for seq_id in output.keys() | prompts.keys()
        }
        tokens: list[StreamTokens] = []
        for seq_id, index, token_id, finish in committed.outcomes:
            stats = self._final_stats(seq_id) if finish is not None else None
            tokens.append(StreamTokens(self._keys[seq_id], index, [token_id], finish, stats))
            if finish is not None:
                self._forget(seq_id)
        failures: list[StreamFailure] = []
        for seq_id, reason in committed.failures:
            failures.append(StreamFailure(self._keys[seq_id], reason, []))
            self._forget(seq_id)
        self._rate.add(now, len(tokens))
        self._step_s += (_SMOOTHING if self._step_s else 1.0) * (result.elapsed_s - self._step_s)
        waiting = self.waiting(MAX_WAITING_TOLD, now)
        return StepReport(self.load(now), tokens, failures, waiting, scores)

    def waiting(self, most: int, now: float) -> list[WaitingStream]:
        """The first `most` of those who wait."""
        if not len(self.scheduler.queue):
            return []
        return [
            WaitingStream(
                self._keys[s.seq_id],
                s.total - s.computed,
                s.preemptions,
                s.recomputed,
                s.stalled_s + (0.0 if s.stalled_since_s is None else now - s.stalled_since_s),
            )
            for s in islice(self.scheduler.queue, most)
        ]

    def load(self, now: float) -> EngineLoad:
        scheduler = self.scheduler
        counters = scheduler.counters
        survey = self._survey_at(now)
        return EngineLoad(
            step=counters.steps,
            blocks_free=scheduler.kv.free,
            blocks_total=scheduler.kv.pool.num_blocks,
            running=len(scheduler.running),
            waiting=len(scheduler.queue),
            waiting_tokens=scheduler.queue.tokens,
            tokens_per_s=self._rate.per_second(now),
            emitted_tokens=counters.emitted_tokens,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            room=survey.room,
            step_s=self._step_s,
            prefill_tokens=survey.prefill_tokens,
            held=survey.held,
        )

    def _survey_at(self, now: float) -> _Survey:
        """Worked out anew once per period, and whenever somebody has come or gone."""
        scheduler, known = self.scheduler, self._survey
        running = len(scheduler.running)
        fresh = now - known.at_s < self._survey_period_s and known.running == running
        if not fresh and self._survey_period_s != math.inf:
            held: dict[int, int] = {}
            # Elsewhere nobody gives way to a larger priority.
            ranked_running = scheduler.running if scheduler.queue.name == "priority" else ()
            for sequence in ranked_running:
                held[sequence.priority] = held.get(sequence.priority, 0) + len(sequence.blocks)
            prefill = sum([s.remaining for s in scheduler.running]) - running
            ranked = tuple(sorted(held.items()))
            self._survey = _Survey(now, running, scheduler.room(), prefill, ranked)
        return self._survey

    def _final_stats(self, seq_id: SequenceId) -> StreamStats:
        sequence = self._sequences[seq_id]
        queued = (sequence.admitted_s or sequence.arrival_s) - sequence.arrival_s
        return StreamStats(queued, sequence.preemptions, sequence.recomputed, sequence.stalled_s)

    def _forget(self, seq_id: SequenceId) -> None:
        del self._streams[self._keys.pop(seq_id)]
        del self._sequences[seq_id]
