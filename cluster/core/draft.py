"""A step while it is being put together: what a batching policy may see and do.

A draft changes nothing. The scheduler looks at the finished draft, and either carries it out
or makes room first and has a new one drawn up: there is nothing to undo by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from cluster.core.admission import Admission, Verdict
from cluster.core.sequence import Sequence


class AdmissionRound:
    """Offers waiting sequences to admission, in queue order, for one draft.

    admitted: (sequence, blocks to take) so far. cause: why the round stopped, "" if it did not.
    """

    __slots__ = ("_admission", "_free", "_running", "_waiting", "admitted", "cause", "taken")

    def __init__(
        self, admission: Admission, waiting: Iterable[Sequence], running: int, free_blocks: int
    ) -> None:
        self._admission = admission
        self._waiting = iter(waiting)
        self._running = running
        self._free = free_blocks
        self.admitted: list[tuple[Sequence, int]] = []
        self.cause = ""
        self.taken = 0

    def next(self, needed: int, at_most: int | None) -> Sequence | None:
        """needed: blocks that the draft's running sequences ask for in this step.
        at_most: the round ends at a sequence with more tokens to compute than this."""
        if self.cause:
            return None
        candidate = next(self._waiting, None)
        if candidate is None:
            return None
        if at_most is not None and candidate.remaining > at_most:
            self.cause = f"a prompt of {candidate.remaining} tokens, room for {at_most}"
            return None
        decision = self._admission.decide(
            candidate, running=self._running, free_blocks=self._free - self.taken - needed
        )
        if decision.verdict is Verdict.STOP:
            self.cause = decision.cause
            return None
        self._running += 1
        self.taken += decision.blocks
        self.admitted.append((candidate, decision.blocks))
        return candidate


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
    are over but keep their row (see State.PADDING). budget: tokens left to give. now: seconds.
    shares: (sequence, tokens) given to running ones; `starts`, to newcomers; `pads`, kept rows.
    needed: blocks that the shares of running sequences need beyond what they hold.
    wake_s: when a policy that waits wants to be asked again. cause: what it waits for.
    """

    __slots__ = (
        "_block_size",
        "_round",
        "budget",
        "cause",
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

    def admit(self, at_most: int | None = None) -> Sequence | None:
        """The next waiting sequence, if it may come in now. None when nobody may.

        The policy then gives it its first tokens with start(). at_most: only if it has no more
        tokens to compute than this.
        """
        return self._round.next(self.needed, at_most)

    def start(self, newcomer: Sequence, tokens: int) -> None:
        """A newcomer's first share; its blocks come from its admission."""
        self.starts.append((newcomer, tokens))
        self.budget -= tokens

    def pad(self, member: Sequence) -> None:
        """Run a row of a member that is over; it costs what a decode costs and emits nothing."""
        self.pads.append(member)
        self.budget -= 1

    def wait(self, cause: str, until_s: float | None) -> None:
        """Nothing this time; ask again at `until_s`, or when something arrives."""
        self.cause = cause
        self.wake_s = until_s
