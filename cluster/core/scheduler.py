"""The scheduler: plan a step, commit its result. The next step may be planned before that.

It knows no prefill and no decode phase. Every sequence has `computed` and `total` tokens, and a
step lets it catch up by some number of them. All choices are policies given at construction.

A plan counts as carried out from the moment it is made: `computed` moves on, and the tokens that it
samples are there, though nobody knows their ids yet. So the next plan is made by the same rules
whether the step before is done or not; the executor fills in the ids, being the first to know them.
What ids decide lags behind: a sequence that stops by a token has one more row in the step planned
meanwhile, whose result is passed over. What needs blocks back (preemption, the end of a batch's
padding) waits until no step is in flight: a victim never has a row under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.admission import Admission, Verdict
from cluster.core.batching.base import BatchingPolicy
from cluster.core.batching.chunked import ChunkedPrefill
from cluster.core.budget import Budget, FixedBudget
from cluster.core.config import SchedulerConfig
from cluster.core.draft import AdmissionRound, Queued, StepDraft
from cluster.core.errors import InvalidRequest, InvariantViolation
from cluster.core.ids import BlockId, SequenceId
from cluster.core.kvspace import KvSpace, PrefixPolicy
from cluster.core.lifecycle import Event, State
from cluster.core.outcome import FinishReason, Outcome
from cluster.core.plan import NewSequence, Row, StepPlan, StepResult, TokenLogprob
from cluster.core.preemption import Preemption, Recompute
from cluster.core.prefix import NoPrefixCache
from cluster.core.queues.base import WaitingQueue
from cluster.core.queues.fcfs import FcfsQueue
from cluster.core.request import EngineRequest
from cluster.core.reserve import EstimatedPeak, Reservation
from cluster.core.sequence import UNKNOWN_TOKEN, Sequence
from cluster.core.victims import NewestArrival, VictimPolicy

MAX_IN_FLIGHT = 2
"""Plans that wait for their commit at once. With more, stop checks would lag by more."""
_LAG = "a step in flight has to be committed first"


@dataclass(slots=True)
class Policies:
    """The choices of one scheduler. Some have state: one Policies per scheduler."""

    batching: BatchingPolicy = field(default_factory=ChunkedPrefill)
    victims: VictimPolicy = field(default_factory=NewestArrival)
    queue: WaitingQueue = field(default_factory=FcfsQueue)
    reservation: Reservation = field(default_factory=EstimatedPeak)
    prefix: PrefixPolicy = field(default_factory=NoPrefixCache)
    preemption: Preemption = field(default_factory=Recompute)
    budget: Budget | None = None
    """None: max_num_batched_tokens in every step."""


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made; they only grow. Tokens, except where named."""

    steps: int = 0
    computed_tokens: int = 0
    emitted_tokens: int = 0
    preemptions: int = 0
    rank_preemptions: int = 0
    """Those of them that let a larger priority in; the others were for want of blocks."""
    pauses: int = 0
    failures: int = 0
    admitted_tokens: int = 0
    """To be computed by those who came in, those found in the prefix cache included."""
    swapped_blocks: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    padded_tokens: int = 0
    wasted_rows: int = 0
    """Rows whose sequence had left, or had stopped in the step before, when their result came."""
    stalled_s: float = 0.0
    """Seconds that preempted sequences waited to come in again, summed over sequences."""


@dataclass(slots=True)
class Committed:
    """What a step meant: tokens in row order, and sequences that could not go on (id, reason).

    logprobs: of the outcomes whose sequences asked for them. prompt_logprobs: whole prompts, with
    the first token of a sequence that asked for them.
    """

    outcomes: list[Outcome]
    failures: list[tuple[SequenceId, str]]
    logprobs: dict[SequenceId, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[SequenceId, list[TokenLogprob]] = field(default_factory=dict)


class _Flight(NamedTuple):
    """A plan that waits for its commit. shares: (sequence, tokens) of its rows, padding left out.
    admissions: how many there had been; a sequence with a newer one came in again since."""

    plan: StepPlan
    shares: list[tuple[Sequence, int]]
    admissions: int


class Scheduler:
    """Owns the sequences, the KV space and the queue of one engine.

    Times are seconds on the caller's clock. Not thread-safe.
    """

    def __init__(self, config: SchedulerConfig, policies: Policies | None = None) -> None:
        policies = policies or Policies()
        self.config = config
        self.kv = KvSpace(
            config.num_blocks, config.block_size, policies.prefix, policies.preemption
        )
        self.queue = policies.queue
        self.batching = policies.batching
        self.running: list[Sequence] = []
        self.padding: list[Sequence] = []
        """Members of a request-level batch that are over but keep their row (State.PADDING)."""
        self.counters = Counters()
        self.granted = 0
        """Budget of the newest plan."""
        self.wait_cause = ""
        """Why the newest plan() gave nobody, or not everybody, anything to do."""
        self.next_wake_s: float | None = None
        """When a policy that waits wants plan() to be called again, if nothing arrives before."""
        self.budget = policies.budget or FixedBudget(config.max_num_batched_tokens)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._victims = policies.victims
        self._reservation = policies.reservation
        self._admission = Admission(config, policies.reservation)
        self._last_id: SequenceId = 0
        self._now = 0.0
        self._turn = 0
        self._admissions = 0
        self._arrivals_closed = False
        self._flights: deque[_Flight] = deque()
        self._released: list[SequenceId] = []

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: EngineRequest, now: float) -> Sequence:
        """Queue a request. Raises InvalidRequest if it could never finish here."""
        decision = self._admission.at_the_door(request)
        if decision.verdict is Verdict.NEVER:
            raise decision.refusal or InvalidRequest.single("request", decision.cause)
        self._last_id += 1
        sequence = Sequence(self._last_id, request, now)
        self._sequences[sequence.seq_id] = sequence
        self.queue.push(sequence)
        return sequence

    def get(self, seq_id: SequenceId) -> Sequence | None:
        """The live sequence of that id; None once it is finished."""
        return self._sequences.get(seq_id)

    def abort(self, seq_id: SequenceId) -> bool:
        """Drop a sequence in whatever state it is. False if it is over already."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return False
        self._withdraw(sequence, Event.ABORT)
        self.kv.drop(sequence)
        del self._sequences[seq_id]
        return True

    def pause(self, seq_id: SequenceId) -> bool:
        """Take a sequence out of all planning until resume(); its blocks are freed.
        False if it is over or paused already."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state is State.PAUSED:
            return False
        self._withdraw(sequence, Event.PAUSE)
        self.counters.pauses += 1
        self._lose_computed(sequence)
        return True

    def resume(self, seq_id: SequenceId) -> bool:
        """Put a paused sequence back in line, ahead of newcomers. False if it is not paused."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state is not State.PAUSED:
            return False
        sequence.apply(Event.RESUME)
        self.queue.push_returning(sequence)
        return True

    def close_arrivals(self) -> None:
        """No more requests will come: a policy that waits for a full batch need not any longer."""
        self._arrivals_closed = True

    def __len__(self) -> int:
        """Live sequences, in whatever state."""
        return len(self._sequences)

    def sequences(self) -> list[Sequence]:
        return list(self._sequences.values())

    def room(self) -> int:
        """Blocks that a newcomer may count on: free ones, less the watermark and what the running
        sequences are still expected to take; negative when too many are in. O(n log n)."""
        committed = self._reservation.committed(self.running, self.config.block_size)
        return self.kv.free - self.config.watermark_blocks - committed

    @property
    def in_flight(self) -> StepPlan | None:
        """The oldest plan that waits for its commit."""
        return self._flights[0].plan if self._flights else None

    # -- a step --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run; `wait_cause` then names why. With a step in
        flight None may also mean that its result is needed first."""
        if len(self._flights) == MAX_IN_FLIGHT:
            raise InvariantViolation(f"step {self._flights[0].plan.step} is not committed yet")
        self._end_batch()
        self._now = now
        self.next_wake_s = None
        composed = self._draft_with_room(now) if self._preempt_for_rank() else None
        if composed is None:
            self.wait_cause = _LAG
            return None
        draft, admissions = composed
        self.wait_cause = draft.cause or admissions.cause
        self.next_wake_s = draft.wake_s
        if not draft.shares and not draft.starts:
            return None
        self.counters.steps += 1
        self.granted = draft.granted
        plan = StepPlan(
            step=self.counters.steps, rows=[], released=self._released, budget=draft.granted
        )
        self._released = []
        self._admit(admissions, plan, now)
        self._fill(draft, plan)
        self.kv.launch(plan)
        self._flights.append(_Flight(plan, draft.shares + draft.starts, self._admissions))
        return plan

    def commit(self, result: StepResult) -> Committed:
        """Take over what the oldest step in flight computed. Sequences that left meanwhile are
        passed over."""
        if not self._flights or self._flights[0].plan.step != result.step:
            raise InvariantViolation(f"result of step {result.step} has no plan in flight")
        flight = self._flights.popleft()
        plan = flight.plan
        self.kv.settle(plan.step)
        self.budget.observe(plan, result.elapsed_s)
        for seq_id, scored in result.prompt_logprobs.items():
            if (sequence := self._sequences.get(seq_id)) is not None:
                sequence.take_prompt_logprobs(scored)
        committed = self._apply_rows(flight, result)
        self._end_batch()
        self.counters.computed_tokens += plan.num_tokens
        self.counters.emitted_tokens += len(committed.outcomes)
        return committed

    # -- planning ------------------------------------------------------------------------------

    def _draft_with_room(self, now: float) -> tuple[StepDraft, AdmissionRound] | None:
        """A draft that the pool can carry; preempts one victim at a time until it can. None if that
        has to wait for the steps in flight.

        After a preemption nobody comes in within the same step: the freed blocks are for those
        who run, and the victim must not bounce straight back.
        """
        if self._flights and self.batching.keeps_rows and not self._unfinished():
            # The batch is over when its last tokens are here; until then none may start.
            return None
        waiting: WaitingQueue | tuple[()] = self.queue
        while True:
            draft, admissions = self._compose(waiting, now)
            if draft.needed + admissions.taken <= self.kv.free:
                return draft, admissions
            if draft.needed > self.kv.free:
                if self._flights:
                    return None
                self._make_room()
            waiting = ()

    def _compose(
        self, waiting: WaitingQueue | tuple[()], now: float
    ) -> tuple[StepDraft, AdmissionRound]:
        admissions = AdmissionRound(self._admission, waiting, self.running, self.kv)
        running = self._unfinished()
        draft = StepDraft(
            running,
            self.padding,
            Queued(len(self.queue), self.queue.peek(), self._arrivals_closed),
            (self.budget.tokens(running, self.queue.tokens), self.config.block_size),
            admissions,
            now,
        )
        self.batching.compose(draft)
        return draft, admissions

    def _unfinished(self) -> list[Sequence]:
        """Those who run, but for those whose last token is in flight: they need no further step,
        yet hold their blocks and their place until it is here."""
        if not self._flights:
            return self.running
        return [s for s in self.running if len(s.tokens) < s.max_total]

    def _make_room(self) -> None:
        """Free some blocks: those that nobody will read again first, else a victim's."""
        if self.padding:
            self._end_padding()
        else:
            self._preempt(self._choose_victim())

    def _choose_victim(self) -> Sequence:
        """Of the lowest priority that runs, so that no victim outranks whom it makes room for."""
        candidates = [s for s in self.running if not self._admission.is_protected(s)]
        if not candidates:
            raise InvariantViolation("the pool is short, but only protected sequences run")
        lowest = min(s.priority for s in candidates)
        return self._victims.choose([s for s in candidates if s.priority == lowest])

    def _preempt_for_rank(self) -> bool:
        """Let the head of the queue in by preempting those whom it outranks, if that is enough.
        False if it has to wait for the steps in flight."""
        head = self.queue.peek()
        if head is None or not self.running:
            return True
        outranked = [
            s
            for s in self.running
            if self.queue.outranks(head, s) and not self._admission.is_protected(s)
        ]
        while outranked and self._fits(head, outranked) and not self._fits(head, []):
            if self._flights:
                return False
            lowest = min(s.priority for s in outranked)
            victim = self._victims.choose([s for s in outranked if s.priority == lowest])
            outranked.remove(victim)
            self._preempt(victim)
            self.counters.rank_preemptions += 1
        return True

    def _fits(self, head: Sequence, without: list[Sequence]) -> bool:
        """Whether `head` could come in if those of `without` were gone."""
        gone = set(without)
        stay = [s for s in self.running if s not in gone]
        free = self.kv.free + sum(len(s.blocks) for s in without)
        decision = self._admission.decide(head, running=stay, free_blocks=free)
        return decision.verdict is Verdict.ADMIT

    def _preempt(self, victim: Sequence) -> None:
        victim.preemptions += 1
        victim.stalled_since_s = self._now
        self.counters.preemptions += 1
        self._withdraw(victim, Event.PREEMPT)
        computed = victim.computed
        if self.kv.evict(victim):
            self.counters.swapped_blocks += len(victim.host_blocks)
        else:
            self._book_recompute(victim, computed)
        self.queue.push_returning(victim)

    def _lose_computed(self, sequence: Sequence) -> None:
        self._book_recompute(sequence, sequence.computed)
        self.kv.drop(sequence)

    def _book_recompute(self, sequence: Sequence, tokens: int) -> None:
        """The recompute tax: what was computed and has to be computed again."""
        sequence.recomputed += tokens
        self.counters.recomputed_tokens += tokens

    def _admit(self, admissions: AdmissionRound, plan: StepPlan, now: float) -> None:
        # All shared blocks are retained first: a newcomer's own blocks must not evict them.
        for sequence, hits, _, _ in admissions.entries:
            self.queue.take(sequence)
            sequence.apply(Event.ADMIT)
            self.counters.admitted_tokens += sequence.remaining
            if hits:
                self.kv.share(sequence, hits)
        for sequence, hits, take, partial in admissions.entries:
            self.kv.grow(sequence, take)
            self.kv.swap_in(sequence)
            if partial is not None:
                self.kv.copy(sequence, partial)
            self.counters.prefix_hit_tokens += self.kv.computed_by(hits, partial)
            if sequence.admitted_s is None:
                sequence.admitted_s = now
            self._end_stall(sequence, now)
            self._admissions += 1
            sequence.admission = self._admissions
            self.running.append(sequence)
            # A copy: the executor's view must not grow when the scheduler's list does.
            plan.admitted.append(
                NewSequence(
                    sequence.seq_id, list(sequence.tokens), sequence.prompt_len, sequence.sampling
                )
            )

    def _end_stall(self, sequence: Sequence, now: float) -> None:
        since = sequence.stalled_since_s
        if since is not None:
            sequence.stalled_s += now - since
            sequence.stalled_since_s = None
            self.counters.stalled_s += now - since

    def _fill(self, draft: StepDraft, plan: StepPlan) -> None:
        """Turn shares into rows, decodes first, take the blocks they need, and count them as
        done."""
        rows, turn, num_tokens = plan.rows, self._turn, 0
        grow_to = self.kv.grow_to
        for sequence, count in draft.shares:
            start = sequence.computed
            end = start + count
            new_blocks: list[BlockId] = [] if end <= sequence.capacity else grow_to(sequence, end)
            samples = end == len(sequence.tokens)
            rows.append(Row(sequence.seq_id, start, count, samples, new_blocks))
            sequence.computed = end
            if samples:
                sequence.tokens.append(UNKNOWN_TOKEN)
            turn += 1
            sequence.turn = turn
            num_tokens += count
        for sequence, count in draft.starts:
            start = sequence.computed
            end = start + count
            samples = end == len(sequence.tokens)
            rows.append(Row(sequence.seq_id, start, count, samples, sequence.blocks[:]))
            sequence.computed = end
            if samples:
                sequence.tokens.append(UNKNOWN_TOKEN)
            turn += 1
            sequence.turn = turn
            num_tokens += count
        for member in draft.pads:
            # Its last position once more: the cost of a decode, and nothing changes.
            rows.append(Row(member.seq_id, member.computed - 1, 1, False, []))
        self._turn = turn
        self.counters.padded_tokens += len(draft.pads)
        plan.num_tokens = num_tokens + len(draft.pads)
        for row in rows:
            if row.count != 1:
                break
            plan.num_decodes += 1

    # -- committing ----------------------------------------------------------------------------

    def _apply_rows(self, flight: _Flight, result: StepResult) -> Committed:
        committed = Committed([], [])
        outcomes, failures = committed.outcomes, committed.failures
        tokens = iter(result.token_ids)
        publish, pool, block_size = self.kv.prefix.publish, self.kv.pool, self.kv.block_size
        left = False
        for (sequence, count), row in zip(flight.shares, flight.plan.rows, strict=False):
            token = next(tokens) if row.samples else None
            if sequence.state is not State.RUNNING or sequence.admission > flight.admissions:
                self.counters.wasted_rows += 1
                continue
            end = sequence.settled = row.start + count
            if end % block_size < count or end == sequence.prompt_len:
                publish(sequence, pool)
            if token is None:
                continue
            if token < 0:
                reason = result.failed.get(sequence.seq_id, "the model gave no token")
                failures.append((sequence.seq_id, reason))
                self.counters.failures += 1
                sequence.rewind()
                left = self._finish(sequence)
                continue
            sequence.tokens[end] = token
            index = end - sequence.prompt_len
            finish: FinishReason | None = None
            if token in sequence.stop_ids and index + 1 >= sequence.sampling.min_tokens:
                finish = FinishReason.STOP
            elif end + 1 >= sequence.max_total:
                finish = FinishReason.LENGTH
            outcomes.append(Outcome(sequence.seq_id, index, token, finish))
            if result.logprobs and sequence.seq_id in result.logprobs:
                committed.logprobs[sequence.seq_id] = result.logprobs[sequence.seq_id]
            if index == 0 and sequence.prompt_logprobs:
                committed.prompt_logprobs[sequence.seq_id] = sequence.prompt_logprobs
            if finish is not None:
                sequence.rewind()
                self._reservation.observe(sequence)
                left = self._finish(sequence)
        if left:
            self.running = [s for s in self.running if s.state is State.RUNNING]
        return committed

    def _finish(self, sequence: Sequence) -> bool:
        del self._sequences[sequence.seq_id]
        self._charge(sequence)
        if self.batching.keeps_rows:
            sequence.apply(Event.KEEP_ROW)
            self.padding.append(sequence)
            return True
        sequence.apply(Event.FINISH)
        self._give_back(sequence)
        return True

    def _end_batch(self) -> None:
        if self.padding and not self.running:
            self._end_padding()

    def _end_padding(self) -> None:
        for member in self.padding:
            member.apply(Event.LEAVE_BATCH)
            self._give_back(member)
        self.padding.clear()

    def _give_back(self, sequence: Sequence) -> None:
        self.kv.drop(sequence)
        self._released.append(sequence.seq_id)

    # -- leaving -------------------------------------------------------------------------------

    def _withdraw(self, sequence: Sequence, event: Event) -> None:
        """Take a live sequence out of the running set or the queue."""
        before = sequence.state
        sequence.apply(event)
        if before is State.RUNNING:
            sequence.rewind()
            self.running.remove(sequence)
            self._released.append(sequence.seq_id)
            self._charge(sequence)
        elif before in (State.WAITING, State.PREEMPTED):
            self.queue.remove(sequence)

    def _charge(self, sequence: Sequence) -> None:
        """Tell the queue what was emitted since the sequence came in."""
        self.queue.charge(sequence, sequence.total - sequence.charged)
        sequence.charged = sequence.total
