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

    __slots__ = ("_admission", "_free", "_running", "_waiting", "admitted", "cause")

    def __init__(
        self, admission: Admission, waiting: Iterable[Sequence], running: int, free_blocks: int
    ) -> None:
        self._admission = admission
        self._waiting = iter(waiting)
        self._running = running
        self._free = free_blocks
        self.admitted: list[tuple[Sequence, int]] = []
        self.cause = ""

    def next(self, needed: int) -> Sequence | None:
        """needed: blocks that the draft's running sequences ask for in this step."""
        if self.cause:
            return None
        candidate = next(self._waiting, None)
        if candidate is None:
            return None
        decision = self._admission.decide(
            candidate, running=self._running, free_blocks=self._free - needed
        )
        if decision.verdict is Verdict.STOP:
            self.cause = decision.cause
            return None
        self._running += 1
        self._free -= decision.blocks
        self.admitted.append((candidate, decision.blocks))
        return candidate


class StepDraft:
    """Shares of one step's token budget.

    running: sequences that run, in the order of their admission. budget: tokens left to give.
    shares: (sequence, tokens) given to running ones, then `starts`, to newcomers. needed: blocks
    that the shares of running sequences need beyond what they hold.
    """

    __slots__ = ("_block_size", "_round", "budget", "needed", "running", "shares", "starts")

    def __init__(
        self,
        running: SequenceOf[Sequence],
        budget: int,
        block_size: int,
        admissions: AdmissionRound,
    ) -> None:
        self.running = running
        self.budget = budget
        self.shares: list[tuple[Sequence, int]] = []
        self.starts: list[tuple[Sequence, int]] = []
        self.needed = 0
        self._block_size = block_size
        self._round = admissions

    def give(self, sequence: Sequence, tokens: int) -> None:
        """Let a running sequence compute `tokens` more positions in this step."""
        self.shares.append((sequence, tokens))
        self.budget -= tokens
        missing = sequence.computed + tokens - sequence.capacity
        if missing > 0:
            self.needed += -(-missing // self._block_size)

    def admit(self) -> Sequence | None:
        """The next waiting sequence, if it may come in now. None when nobody may.
        The policy then gives it its first tokens with start()."""
        return self._round.next(self.needed)

    def start(self, newcomer: Sequence, tokens: int) -> None:
        """A newcomer's first share; its blocks come from its admission."""
        self.starts.append((newcomer, tokens))
        self.budget -= tokens
