"""How many blocks a sequence takes when it is admitted."""

from __future__ import annotations

from typing import Protocol

from cluster.core.config import blocks_for
from cluster.core.sequence import Sequence


class Reservation(Protocol):
    def at_admission(self, sequence: Sequence, block_size: int) -> int:
        """Blocks to take when the sequence comes in; more are taken later, as it grows."""


class KnownTokens:
    """Blocks for all tokens known so far (prompt + emitted): a chunked prefill, once begun, cannot
    be starved by the decodes beside it, and a replay never starts that could not end."""

    def at_admission(self, sequence: Sequence, block_size: int) -> int:
        return blocks_for(sequence.total, block_size)


class WholeLife:
    """Blocks for the longest the sequence may become (prompt + max_tokens; Orca, OSDI 2022).

    Used for protected sequences: one that was preempted often enough comes back with everything
    it can ever need, so it neither has to give way again nor makes another one give way.
    """

    def at_admission(self, sequence: Sequence, block_size: int) -> int:
        return blocks_for(sequence.max_total, block_size)
