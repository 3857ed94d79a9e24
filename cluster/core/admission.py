"""Whether the next waiting sequence comes in now: a decision first, its effects later."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.core.config import SchedulerConfig
from cluster.core.reserve import Reservation, WholeLife
from cluster.core.sequence import Sequence


class Verdict(Enum):
    ADMIT = "admit"
    STOP = "stop"
    """Not now, and nobody behind it either: overtaking would starve it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """verdict, the blocks to take when it is ADMIT, and the named cause when it is STOP."""

    verdict: Verdict
    blocks: int = 0
    cause: str = ""


class Admission:
    """Lets a sequence in only if the whole of it (prompt + emitted) plus the watermark fits.

    The watermark is waived for a sequence that would run alone, which could otherwise wait forever.
    """

    def __init__(self, config: SchedulerConfig, reservation: Reservation) -> None:
        self._config = config
        self._reservation = reservation
        self._protected = WholeLife()

    def is_protected(self, sequence: Sequence) -> bool:
        """True once it may not be preempted any more; with max_preemptions 0 that is everybody."""
        return sequence.preemptions >= self._config.max_preemptions

    def decide(self, sequence: Sequence, *, running: int, free_blocks: int) -> Decision:
        """running: sequences that run, those admitted earlier in this step included.
        free_blocks: blocks that nobody has, after this step's other needs."""
        if running >= self._config.max_num_seqs:
            return Decision(Verdict.STOP, cause=f"max_num_seqs ({running}) are running")
        reservation = self._protected if self.is_protected(sequence) else self._reservation
        blocks = reservation.at_admission(sequence, self._config.block_size)
        watermark = self._config.watermark_blocks if running else 0
        if blocks + watermark > free_blocks:
            return Decision(
                Verdict.STOP,
                cause=f"needs {blocks} blocks + watermark {watermark}, {free_blocks} are free",
            )
        return Decision(Verdict.ADMIT, blocks)
