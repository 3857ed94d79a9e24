"""How many blocks must be free for a sequence to come in, and how many it takes at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from cluster.core.config import blocks_for
from cluster.core.sequence import Sequence


class Demand(NamedTuple):
    """free: blocks that must be free besides the watermark. take: blocks taken at admission; the
    rest is taken as the sequence grows."""

    free: int
    take: int


class Reservation(Protocol):
    name: str

    def demand(
        self, candidate: Sequence, running: SequenceOf[Sequence], block_size: int, pledged: int = 0
    ) -> Demand:
        """running: those who run, those admitted earlier in this step included. pledged: blocks
        that the latter are about to take; they count as held, not as free."""

    def committed(self, running: SequenceOf[Sequence], block_size: int) -> int:
        """Blocks that the running sequences are expected to take beyond those that they hold."""

    def observe(self, sequence: Sequence) -> None:
        """A sequence has finished by itself (for policies that learn output lengths)."""


class OnDemand:
    """Take blocks only as positions are computed; come in if all known tokens would fit, after
    what the running sequences still need for theirs (vLLM)."""

    name = "on-demand"

    def demand(
        self, candidate: Sequence, running: SequenceOf[Sequence], block_size: int, pledged: int = 0
    ) -> Demand:
        promised = sum(_missing(s, block_size) for s in running if s.remaining > 1)
        promised = max(0, promised - pledged)
        return Demand(blocks_for(candidate.total, block_size) + promised, 0)

    def committed(self, running: SequenceOf[Sequence], block_size: int) -> int:
        return sum(_missing(s, block_size) for s in running)

    def observe(self, sequence: Sequence) -> None:
        """Of no account here."""


class KnownTokens:
    """Blocks for all tokens known so far (prompt + emitted): a chunked prefill, once begun, cannot
    be starved by the decodes beside it, and a replay never starts that could not end."""

    name = "prompt"

    def demand(
        self, candidate: Sequence, running: SequenceOf[Sequence], block_size: int, pledged: int = 0
    ) -> Demand:
        blocks = blocks_for(candidate.total, block_size)
        return Demand(blocks, blocks)

    def committed(self, running: SequenceOf[Sequence], block_size: int) -> int:
        return sum(_missing(s, block_size) for s in running)

    def observe(self, sequence: Sequence) -> None:
        """Of no account here."""


class WholeLife:
    """Blocks for the longest the sequence may become (prompt + max_tokens; Orca, OSDI 2022).

    Also used for protected sequences: one that was preempted often enough comes back with
    everything it can ever need, so it neither has to give way again nor makes another one.
    """

    name = "worst-case"

    def demand(
        self, candidate: Sequence, running: SequenceOf[Sequence], block_size: int, pledged: int = 0
    ) -> Demand:
        blocks = blocks_for(candidate.max_total, block_size)
        return Demand(blocks, blocks)

    def committed(self, running: SequenceOf[Sequence], block_size: int) -> int:
        return sum(blocks_for(s.max_total, block_size) - len(s.blocks) for s in running)

    def observe(self, sequence: Sequence) -> None:
        """Of no account here."""


class EstimatedPeak:
    """Come in if the pool can carry the highest moment that lies ahead.

    Sort the running sequences by remaining output, longest first. When the i-th of them ends, it
    and those before it are all there, each grown by the i-th's remaining output; the largest such
    sum is the future peak (Past-Future scheduler, Gong et al., ASPLOS 2025; LightLLM).

    The remaining output is guessed from the last finished outputs that were longer than what the
    sequence has emitted: their 90th percentile. Where there are none, it is guessed to go on for
    as long again, at least PRIOR tokens; never beyond its max_tokens.
    """

    name = "estimated-peak"

    HISTORY = 256
    QUANTILE = 0.9
    PRIOR = 256

    def __init__(self) -> None:
        self._outputs: deque[int] = deque()
        self._ordered: list[int] = []

    def demand(
        self, candidate: Sequence, running: SequenceOf[Sequence], block_size: int, pledged: int = 0
    ) -> Demand:
        take = blocks_for(candidate.total, block_size)
        lives = [(self._remaining(s), s.total) for s in running]
        lives.append((self._remaining(candidate), candidate.total))
        held = pledged + sum(len(s.blocks) for s in running)
        return Demand(max(take, _peak(lives, block_size) - held), take)

    def committed(self, running: SequenceOf[Sequence], block_size: int) -> int:
        lives = [(self._remaining(s), s.total) for s in running]
        return max(0, _peak(lives, block_size) - sum(len(s.blocks) for s in running))

    def observe(self, sequence: Sequence) -> None:
        if len(self._outputs) == self.HISTORY:
            del self._ordered[bisect_left(self._ordered, self._outputs.popleft())]
        self._outputs.append(sequence.emitted)
        insort(self._ordered, sequence.emitted)

    def _remaining(self, sequence: Sequence) -> int:
        emitted = sequence.emitted
        left = sequence.max_total - sequence.total
        first_longer = bisect_right(self._ordered, emitted)
        longer = len(self._ordered) - first_longer
        if longer == 0:
            return min(left, max(self.PRIOR, emitted))
        guess = self._ordered[first_longer + int(self.QUANTILE * (longer - 1))]
        return min(left, guess - emitted)


def _peak(lives: list[tuple[int, int]], block_size: int) -> int:
    """The most blocks held at any moment ahead. lives: (remaining output, tokens) per sequence."""
    lives.sort(reverse=True)
    peak, totals = 0, 0
    for count, (remaining, total) in enumerate(lives, 1):
        totals += total
        peak = max(peak, blocks_for(totals + count * remaining, block_size))
    return peak


def _missing(sequence: Sequence, block_size: int) -> int:
    return max(0, blocks_for(sequence.total, block_size) - len(sequence.blocks))
