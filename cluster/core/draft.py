"""A step while it is being put together: what a batching policy may see and do.

A draft changes nothing. The scheduler looks at the finished draft, and either carries it out
or makes room first and has a new one drawn up: there is nothing to undo by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from cluster.core.admission import Admission, Shared, Verdict
from cluster.core.config import blocks_for
from cluster.core.ids import BlockId
from cluster.core.kvspace import KvSpace
from cluster.core.prefix import PartialHit
from cluster.core.sequence import Sequence


class Entry(NamedTuple):
    """A sequence that comes in: blocks it shares, how many it takes besides, and the block that
    its first own one starts as a copy of."""

    sequence: Sequence
    hits: list[BlockId]
    take: int
    partial: PartialHit | None


class AdmissionRound:
    """Offers waiting sequences to admission, in queue order, for one draft.

    entries: those who come in, so far. taken: free blocks that they take. cause: why the round
    stopped, "" if it did not.
    """

    __slots__ = ("_admission", "_kv", "_running", "_waiting", "cause", "entries", "taken")

    def __init__(
        self,
        admission: Admission,
        waiting: Iterable[Sequence],
        running: SequenceOf[Sequence],
        kv: KvSpace,
    ) -> None:
        self._admission = admission
        self._kv = kv
        self._waiting = iter(waiting)
        self._running = running
        self.entries: list[Entry] = []
        self.cause = ""
        self.taken = 0

    def next(self, needed: int, budget: int, at_most: int | None) -> tuple[Sequence, int] | None:
        """The next one to come in, with the tokens that it computes first; None when nobody may.

        needed: blocks that the draft's running sequences ask for in this step. budget: tokens that
        the step has left. at_most: the round ends at a sequence with more tokens to compute.
        """
        while not self.cause:
            # Before the queue is looked at: some queues have to work for their order.
            if not self._admission.has_slot(len(self._running) + len(self.entries)):
                self.cause = f"max_num_seqs ({len(self._running) + len(self.entries)}) are running"
                return None
            candidate = next(self._waiting, None)
            if candidate is None:
                return None
            hits, partial = self._kv.hits(candidate)
            remaining = candidate.remaining - self._kv.computed_by(hits, partial)
            if at_most is not None and remaining > at_most:
                self.cause = f"a prompt of {remaining} tokens, room for {at_most}"
                return None
            tokens = min(remaining, budget)
            entry = self._consider(Entry(candidate, hits, 0, partial), needed, remaining - tokens)
            if entry is not None:
                self.entries.append(entry)
                return candidate, tokens
        return None

    def _consider(self, offer: Entry, needed: int, later: int) -> Entry | None:
        """The offer with the blocks to take; None if it is skipped, or the round is over (`cause`).
        later: tokens of it that are left for later steps."""
        candidate, hits, _, partial = offer
        running = [*self._running, *(e.sequence for e in self.entries)]
        shared = Shared(
            blocks=len(hits),
            cached=self._kv.cost_of(hits),
            coming=self._kv.is_coming(candidate, len(hits), running),
        )
        decision = self._admission.decide(
            candidate,
            running=running,
            free_blocks=self._kv.free - self.taken - needed,
            shared=shared,
            pledged=self.taken,
        )
        if decision.verdict is Verdict.STOP:
            self.cause = decision.cause
        if decision.verdict is not Verdict.ADMIT:
            return None
        first = blocks_for(candidate.total - later, self._kv.block_size)
        take = max(max(decision.blocks, first) - len(hits), len(candidate.host_blocks))
        self.taken += take + shared.cached
        return Entry(candidate, hits, take, partial)


class Queued:
    """What a policy may know of the queue without touching it.

    count: sequences waiting. head_tokens, oldest_arrival_s: of the one at the head; 0 if nobody
    waits. closed: no more will come.
    """

    __slots__ = ("closed", "count", "head_tokens", "oldest_arrival_s")

    def __init__(self, count: int, head: Sequence | None, closed: bool) -> None:
        self.count = count
        self.head_tokens = head.remaining if head is not None else 0
        self.oldest_arrival_s = head.arrival_s if head is not None else 0.0
        self.closed = closed


class StepDraft:
    """Shares of one step's token budget.

    running: sequences that run, in the order of their admission. padding: members of a batch that
    are over but keep their row (see State.PADDING). granted: the step's budget. budget: tokens left
    to give. now: seconds.
    shares: (sequence, tokens) given to running ones; `starts`, to newcomers; `pads`, kept rows.
    needed: blocks that the shares of running sequences need beyond what they hold.
    wake_s: when a policy that waits wants to be asked again. cause: what it waits for.
    """

    __slots__ = (
        "_block_size",
        "_round",
        "budget",
        "cause",
        "granted",
        "needed",
        "now",
        "padding",
        "pads",
        "queued",
        "running",
        "shares",
        "starts",
        "wake_s",
    )

    def __init__(
        self,
        running: SequenceOf[Sequence],
        padding: SequenceOf[Sequence],
        queued: Queued,
        limits: tuple[int, int],
        admissions: AdmissionRound,
        now: float,
    ) -> None:
        """limits: (tokens to give, block size)."""
        self.running = running
        self.padding = padding
        self.queued = queued
        self.budget, self._block_size = limits
        self.granted = self.budget
        self.now = now
        self.shares: list[tuple[Sequence, int]] = []
        self.starts: list[tuple[Sequence, int]] = []
        self.pads: list[Sequence] = []
        self.needed = 0
        self.wake_s: float | None = None
        self.cause = ""
        self._round = admissions

    def give(self, sequence: Sequence, tokens: int) -> None:
        """Let a running sequence compute `tokens` more positions in this step."""
        self.shares.append((sequence, tokens))
        self.budget -= tokens
        missing = sequence.computed + tokens - sequence.capacity
        if missing > 0:
            self.needed += -(-missing // self._block_size)

    def give_each_one(self, sequences: list[Sequence]) -> None:
        """One position to each: what give() does, without its cost per sequence."""
        self.shares += [(sequence, 1) for sequence in sequences]
        self.budget -= len(sequences)
        self.needed += sum([s.computed >= s.capacity for s in sequences])

    def start_next(self, at_most: int | None = None) -> bool:
        """Let the next waiting sequence in, with as much of its prompt as the budget has left.
        False when nobody may come in now. at_most: only if it has no more tokens to compute."""
        entry = self._round.next(self.needed, self.budget, at_most)
        if entry is None:
            return False
        newcomer, tokens = entry
        self.starts.append((newcomer, tokens))
        self.budget -= tokens
        return True

    def pad(self, member: Sequence) -> None:
        """Run a row of a member that is over; it costs what a decode costs and emits nothing."""
        self.pads.append(member)
        self.budget -= 1

    def wait(self, cause: str, until_s: float | None) -> None:
        """Nothing this time; ask again at `until_s`, or when something arrives."""
        self.cause = cause
        self.wake_s = until_s
