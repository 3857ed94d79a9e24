"""The scheduler: plan a step, commit its result. One plan is out at a time.

It knows no prefill and no decode phase. Every sequence has `computed` and `total` tokens, and a
step lets it catch up by some number of them. All choices are policies given at construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
from cluster.core.sequence import Sequence
from cluster.core.victims import NewestArrival, VictimPolicy


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
    swapped_blocks: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    padded_tokens: int = 0
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
        self._in_flight: StepPlan | None = None
        self._shares: list[tuple[Sequence, int]] = []
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
        """The plan that waits for its commit."""
        return self._in_flight

    # -- a step --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run; `wait_cause` then names why."""
        if self._in_flight is not None:
            raise InvariantViolation(f"step {self._in_flight.step} is not committed yet")
        self._end_batch()
        self._now = now
        self._preempt_for_rank()
        draft, admissions = self._draft_with_room(now)
        self.wait_cause = draft.cause or admissions.cause
        self.next_wake_s = draft.wake_s
        if not draft.shares and not draft.starts:
            return None
        self.counters.steps += 1
        plan = StepPlan(
            step=self.counters.steps, rows=[], released=self._released, budget=draft.granted
        )
        self._released = []
        self._admit(admissions, plan, now)
        self._fill(draft, plan)
        self.kv.launch(plan)
        self._in_flight = plan
        return plan

    def commit(self, result: StepResult) -> Committed:
        """Take over what the step computed. Sequences that left meanwhile are passed over."""
        plan = self._in_flight
        if plan is None or plan.step != result.step:
            raise InvariantViolation(f"result of step {result.step} has no plan in flight")
        self._in_flight = None
        self.kv.settle()
        self.budget.observe(plan, result.elapsed_s)
        for seq_id, scored in result.prompt_logprobs.items():
            if (sequence := self._sequences.get(seq_id)) is not None:
                sequence.take_prompt_logprobs(scored)
        committed = self._apply_rows(plan, result)
        self._shares = []
        self._end_batch()
        self.counters.computed_tokens += plan.num_tokens
        self.counters.emitted_tokens += len(committed.outcomes)
        return committed

    # -- planning ------------------------------------------------------------------------------

    def _draft_with_room(self, now: float) -> tuple[StepDraft, AdmissionRound]:
        """A draft that the pool can carry; preempts one victim at a time until it can.

        After a preemption nobody comes in within the same step: the freed blocks are for those
        who run, and the victim must not bounce straight back.
        """
        waiting: WaitingQueue | tuple[()] = self.queue
        while True:
            draft, admissions = self._compose(waiting, now)
            if draft.needed + admissions.taken <= self.kv.free:
                return draft, admissions
            if draft.needed > self.kv.free:
                self._make_room()
            waiting = ()

    def _compose(
        self, waiting: WaitingQueue | tuple[()], now: float
    ) -> tuple[StepDraft, AdmissionRound]:
        admissions = AdmissionRound(self._admission, waiting, self.running, self.kv)
        draft = StepDraft(
            self.running,
            self.padding,
            Queued(len(self.queue), self.queue.peek(), self._arrivals_closed),
            (self.budget.tokens(self.running, self.queue.tokens), self.config.block_size),
            admissions,
            now,
        )
        self.batching.compose(draft)
        return draft, admissions

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

    def _preempt_for_rank(self) -> None:
        """Let the head of the queue in by preempting those whom it outranks, if that is enough."""
        head = self.queue.peek()
        if head is None or not self.running:
            return
        outranked = [
            s
            for s in self.running
            if self.queue.outranks(head, s) and not self._admission.is_protected(s)
        ]
        while outranked and self._fits(head, outranked) and not self._fits(head, []):
            lowest = min(s.priority for s in outranked)
            victim = self._victims.choose([s for s in outranked if s.priority == lowest])
            outranked.remove(victim)
            self._preempt(victim)

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
        """Turn shares into rows, decodes first, and take the blocks they need."""
        rows, turn, num_tokens = plan.rows, self._turn, 0
        grow_to = self.kv.grow_to
        for sequence, count in draft.shares:
            start = sequence.computed
            end = start + count
            new_blocks: list[BlockId] = [] if end <= sequence.capacity else grow_to(sequence, end)
            rows.append(Row(sequence.seq_id, start, count, end == len(sequence.tokens), new_blocks))
            turn += 1
            sequence.turn = turn
            num_tokens += count
        for sequence, count in draft.starts:
            start = sequence.computed
            samples = start + count == len(sequence.tokens)
            rows.append(Row(sequence.seq_id, start, count, samples, sequence.blocks[:]))
            turn += 1
            sequence.turn = turn
            num_tokens += count
        for member in draft.pads:
            # Its last position once more: the cost of a decode, and nothing changes.
            rows.append(Row(member.seq_id, member.computed - 1, 1, False, []))
        self._turn = turn
        self._shares = draft.shares + draft.starts
        self.counters.padded_tokens += len(draft.pads)
        plan.num_tokens = num_tokens + len(draft.pads)
        for row in rows:
            if row.count != 1:
                break
            plan.num_decodes += 1

    # -- committing ----------------------------------------------------------------------------

    def _apply_rows(self, plan: StepPlan, result: StepResult) -> Committed:
        committed = Committed([], [])
        outcomes, failures = committed.outcomes, committed.failures
        tokens = iter(result.token_ids)
        publish, pool, block_size = self.kv.prefix.publish, self.kv.pool, self.kv.block_size
        left = False
        for (sequence, count), row in zip(self._shares, plan.rows, strict=False):
            token = next(tokens) if row.samples else None
            if sequence.state is not State.RUNNING:
                continue
            computed = sequence.computed = sequence.computed + count
            if computed % block_size < count or computed == sequence.prompt_len:
                publish(sequence, pool)
            if token is None:
                continue
            if token < 0:
                reason = result.failed.get(sequence.seq_id, "the model gave no token")
                failures.append((sequence.seq_id, reason))
                left = self._finish(sequence)
                continue
            sequence.tokens.append(token)
            total = len(sequence.tokens)
            index = total - sequence.prompt_len - 1
            finish: FinishReason | None = None
            if token in sequence.stop_ids and index + 1 >= sequence.sampling.min_tokens:
                finish = FinishReason.STOP
            elif total >= sequence.max_total:
                finish = FinishReason.LENGTH
            outcomes.append(Outcome(sequence.seq_id, index, token, finish))
            if result.logprobs and sequence.seq_id in result.logprobs:
                committed.logprobs[sequence.seq_id] = result.logprobs[sequence.seq_id]
            if index == 0 and sequence.prompt_logprobs:
                committed.prompt_logprobs[sequence.seq_id] = sequence.prompt_logprobs
            if finish is not None:
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
            self.running.remove(sequence)
            self._released.append(sequence.seq_id)
            self._charge(sequence)
        elif before in (State.WAITING, State.PREEMPTED):
            self.queue.remove(sequence)

    def _charge(self, sequence: Sequence) -> None:
        """Tell the queue what was emitted since the sequence came in."""
        self.queue.charge(sequence, sequence.total - sequence.charged)
        sequence.charged = sequence.total
