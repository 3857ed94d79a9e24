"""The scheduler: plan a step, commit its result. One plan is out at a time.

It knows no prefill and no decode phase. Every sequence has `computed` and `total` tokens, and a
step lets it catch up by some number of them. All choices are policies given at construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core.admission import Admission
from cluster.core.batching.base import BatchingPolicy
from cluster.core.batching.chunked import ChunkedPrefill
from cluster.core.blocks import BlockPool
from cluster.core.config import SchedulerConfig
from cluster.core.draft import AdmissionRound, Queued, StepDraft
from cluster.core.errors import InvariantViolation
from cluster.core.ids import BlockId, SequenceId
from cluster.core.lifecycle import Event, State
from cluster.core.outcome import FinishReason, Outcome
from cluster.core.plan import NewSequence, Row, StepPlan, StepResult
from cluster.core.queues import FcfsQueue, WaitingQueue
from cluster.core.request import EngineRequest, check_fits
from cluster.core.reserve import KnownTokens, Reservation
from cluster.core.sequence import Sequence
from cluster.core.victims import NewestFirst, VictimPolicy


@dataclass(slots=True)
class Policies:
    """The choices of one scheduler. A queue has state: one Policies per scheduler."""

    batching: BatchingPolicy = field(default_factory=ChunkedPrefill)
    victims: VictimPolicy = field(default_factory=NewestFirst)
    queue: WaitingQueue = field(default_factory=FcfsQueue)
    reservation: Reservation = field(default_factory=KnownTokens)


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made; they only grow."""

    steps: int = 0
    computed_tokens: int = 0
    emitted_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(slots=True)
class Committed:
    """What a step meant: tokens in row order, and sequences that could not go on (id, reason)."""

    outcomes: list[Outcome]
    failures: list[tuple[SequenceId, str]]


class Scheduler:
    """Owns the sequences, the block pool and the queue of one engine.

    Times are seconds on the caller's clock. Not thread-safe.
    """

    def __init__(self, config: SchedulerConfig, policies: Policies | None = None) -> None:
        policies = policies or Policies()
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.queue = policies.queue
        self.running: list[Sequence] = []
        self.padding: list[Sequence] = []
        """Members of a request-level batch that are over but keep their row (State.PADDING)."""
        self.counters = Counters()
        self.wait_cause = ""
        """Why the newest plan() gave nobody, or not everybody, anything to do."""
        self.next_wake_s: float | None = None
        """When a policy that waits wants plan() to be called again, if nothing arrives before."""
        self._sequences: dict[SequenceId, Sequence] = {}
        self.batching = policies.batching
        self._victims = policies.victims
        self._admission = Admission(config, policies.reservation)
        self._next_id: SequenceId = 1
        self._turn = 0
        self._arrivals_closed = False
        self._in_flight: StepPlan | None = None
        self._shares: list[tuple[Sequence, int]] = []
        self._released: list[SequenceId] = []
        self._freed_after_step: list[BlockId] = []

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: EngineRequest, now: float) -> Sequence:
        """Queue a request. Raises InvalidRequest if it could never finish here."""
        check_fits(request, self.config.max_sequence_len)
        sequence = Sequence(self._next_id, request, now)
        self._next_id += 1
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
        del self._sequences[seq_id]
        return True

    def pause(self, seq_id: SequenceId) -> bool:
        """Take a sequence out of all planning until resume(); its blocks are freed.
        False if it is over or paused already."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state is State.PAUSED:
            return False
        self._lose_computed(sequence)
        self._withdraw(sequence, Event.PAUSE)
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

    @property
    def in_flight(self) -> StepPlan | None:
        """The plan that waits for its commit."""
        return self._in_flight

    @property
    def pending_free(self) -> list[BlockId]:
        """Blocks of sequences that left while a step still writes to them; free at its commit."""
        return list(self._freed_after_step)

    # -- a step --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run; `wait_cause` then names why."""
        if self._in_flight is not None:
            raise InvariantViolation(f"step {self._in_flight.step} is not committed yet")
        self._end_batch()
        draft, admissions = self._draft_with_room(now)
        self.wait_cause = draft.cause or admissions.cause
        self.next_wake_s = draft.wake_s
        if not draft.shares and not draft.starts:
            return None
        self.counters.steps += 1
        plan = StepPlan(step=self.counters.steps, rows=[], released=self._released)
        self._released = []
        self._admit(admissions, plan, now)
        self._fill(draft, plan)
        self._in_flight = plan
        return plan

    def commit(self, result: StepResult) -> Committed:
        """Take over what the step computed. Sequences that left meanwhile are passed over."""
        plan = self._in_flight
        if plan is None or plan.step != result.step:
            raise InvariantViolation(f"result of step {result.step} has no plan in flight")
        self._in_flight = None
        committed = self._apply_rows(plan, result)
        if self._freed_after_step:
            self.pool.release(self._freed_after_step)
            self._freed_after_step = []
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
            free = self.pool.free
            if draft.needed + admissions.taken <= free:
                return draft, admissions
            if draft.needed > free:
                self._make_room()
            waiting = ()

    def _compose(
        self, waiting: WaitingQueue | tuple[()], now: float
    ) -> tuple[StepDraft, AdmissionRound]:
        config = self.config
        admissions = AdmissionRound(self._admission, waiting, len(self.running), self.pool.free)
        draft = StepDraft(
            self.running,
            self.padding,
            Queued(len(self.queue), self.queue.peek(), self._arrivals_closed),
            (config.max_num_batched_tokens, config.block_size),
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
        candidates = [s for s in self.running if not self._admission.is_protected(s)]
        if not candidates:
            raise InvariantViolation("the pool is short, but only protected sequences run")
        return self._victims.choose(candidates)

    def _preempt(self, victim: Sequence) -> None:
        victim.preemptions += 1
        self.counters.preemptions += 1
        self._lose_computed(victim)
        self._withdraw(victim, Event.PREEMPT)
        self.queue.push_returning(victim)

    def _lose_computed(self, sequence: Sequence) -> None:
        """Book the recompute tax of a sequence whose blocks are about to be taken."""
        sequence.recomputed += sequence.computed
        self.counters.recomputed_tokens += sequence.computed

    def _admit(self, admissions: AdmissionRound, plan: StepPlan, now: float) -> None:
        for sequence, blocks in admissions.admitted:
            if self.queue.pop() is not sequence:
                raise InvariantViolation("the queue changed its order within a step")
            sequence.apply(Event.ADMIT)
            sequence.grant(self.pool.allocate(blocks), self.config.block_size)
            if sequence.admitted_s is None:
                sequence.admitted_s = now
            self.running.append(sequence)
            # A copy: the executor's view must not grow when the scheduler's list does.
            plan.admitted.append(
                NewSequence(
                    sequence.seq_id, list(sequence.tokens), sequence.prompt_len, sequence.sampling
                )
            )

    def _fill(self, draft: StepDraft, plan: StepPlan) -> None:
        """Turn shares into rows, decodes first, and take the blocks they need."""
        rows, shares = plan.rows, draft.shares
        block_size, turn = self.config.block_size, self._turn
        num_tokens = 0
        for sequence, count in shares:
            start = sequence.computed
            end = start + count
            new_blocks: list[BlockId] = []
            if end > sequence.capacity:
                new_blocks = self.pool.allocate(-(-(end - sequence.capacity) // block_size))
                sequence.grant(new_blocks, block_size)
            rows.append(Row(sequence.seq_id, start, count, end == len(sequence.tokens), new_blocks))
            turn += 1
            sequence.turn = turn
            num_tokens += count
        for sequence, count in draft.starts:
            rows.append(
                Row(sequence.seq_id, 0, count, count == len(sequence.tokens), sequence.blocks[:])
            )
            turn += 1
            sequence.turn = turn
            num_tokens += count
        self._turn = turn
        self._shares = shares + draft.starts
        for member in draft.pads:
            # Its last position once more: the cost of a decode, and nothing changes.
            rows.append(Row(member.seq_id, member.computed - 1, 1, False, []))
        plan.num_tokens = num_tokens + len(draft.pads)
        for row in rows:
            if row.count != 1:
                break
            plan.num_decodes += 1

    # -- committing ----------------------------------------------------------------------------

    def _apply_rows(self, plan: StepPlan, result: StepResult) -> Committed:
        outcomes: list[Outcome] = []
        failures: list[tuple[SequenceId, str]] = []
        tokens = iter(result.token_ids)
        left = False
        for (sequence, count), row in zip(self._shares, plan.rows, strict=False):
            token = next(tokens) if row.samples else None
            if sequence.state is not State.RUNNING:
                continue
            sequence.computed += count
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
            if finish is not None:
                left = self._finish(sequence)
        if left:
            self.running = [s for s in self.running if s.state is State.RUNNING]
        return Committed(outcomes, failures)

    def _finish(self, sequence: Sequence) -> bool:
        del self._sequences[sequence.seq_id]
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
        self.pool.release(sequence.surrender())
        self._released.append(sequence.seq_id)

    # -- leaving -------------------------------------------------------------------------------

    def _withdraw(self, sequence: Sequence, event: Event) -> None:
        """Take a live sequence out of the running set or the queue, and its blocks back."""
        before = sequence.state
        sequence.apply(event)
        if before is State.RUNNING:
            self.running.remove(sequence)
            self._released.append(sequence.seq_id)
            blocks = sequence.surrender()
            if self._in_flight is None:
                self.pool.release(blocks)
            else:
                self._freed_after_step.extend(blocks)
        elif before in (State.WAITING, State.PREEMPTED):
            self.queue.remove(sequence)
