"""Whether the next waiting sequence comes in now: a decision first, its effects later."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cluster.core.config import SchedulerConfig
from cluster.core.errors import InvalidRequest
from cluster.core.request import EngineRequest, check_fits
from cluster.core.reserve import Reservation, WholeLife
from cluster.core.sequence import Sequence


class Verdict(Enum):
    ADMIT = "admit"
    SKIP = "skip"
    """Not now, but those behind it may: it waits for something of its own."""
    STOP = "stop"
    """Not now, and nobody behind it either: overtaking would starve it."""
    NEVER = "never"
    """It could not finish even alone; refused at the door."""


@dataclass(frozen=True, slots=True)
class Decision:
    """verdict, the blocks to have at the start when it is ADMIT, and the named cause when it is not
    (with NEVER, as the error that names the field as well)."""

    verdict: Verdict
    blocks: int = 0
    cause: str = ""
    refusal: InvalidRequest | None = None


class Shared(NamedTuple):
    """What a sequence need not compute: blocks that somebody has computed, how many of these are
    only cached (and so count as free until they are taken), and whether its next block is just
    being computed by a running sequence."""

    blocks: int
    cached: int
    coming: bool


NOTHING_SHARED = Shared(0, 0, False)


class Admission:
    """Lets a sequence in only if the whole of it (prompt + emitted) plus the watermark fits.

    The watermark is waived for a sequence that would run alone, which could otherwise wait forever.
    """

    def __init__(self, config: SchedulerConfig, reservation: Reservation) -> None:
        self._config = config
        self._reservation = reservation
        self._protected = WholeLife()

    def has_slot(self, running: int) -> bool:
        """Whether one more sequence may run beside `running` others."""
        return running < self._config.max_num_seqs

    def is_protected(self, sequence: Sequence) -> bool:
        """True once it may not be preempted any more; with max_preemptions 0 that is everybody."""
        return sequence.preemptions >= self._config.max_preemptions

    def at_the_door(self, request: EngineRequest) -> Decision:
        """NEVER for a request that could not finish in an empty engine, else ADMIT to the queue."""
        try:
            check_fits(request, self._config.max_sequence_len)
        except InvalidRequest as refusal:
            return Decision(Verdict.NEVER, cause=str(refusal), refusal=refusal)
        return Decision(Verdict.ADMIT)

    def decide(
        self,
        sequence: Sequence,
        *,
        running: SequenceOf[Sequence],
        free_blocks: int,
        shared: Shared = NOTHING_SHARED,
        pledged: int = 0,
    ) -> Decision:
        """running: sequences that run, those admitted earlier in this step included.
        free_blocks: blocks that nobody has, after this step's other needs. pledged: blocks that
        those admitted earlier in this step take; not part of free_blocks."""
        config = self._config
        if not self.has_slot(len(running)):
            return Decision(Verdict.STOP, cause=f"max_num_seqs ({len(running)}) are running")
        if shared.coming:
            return Decision(Verdict.SKIP, cause="its prefix is being computed by another sequence")
        reservation = self._protected if self.is_protected(sequence) else self._reservation
        demand = reservation.demand(sequence, running, config.block_size, pledged)
        watermark = config.watermark_blocks
        if not running:
            # Alone: what it will need one day is no reason to wait, what it needs now is there.
            return Decision(Verdict.ADMIT, demand.take)
        needed = max(0, demand.free - shared.blocks) + shared.cached
        if needed + watermark > free_blocks:
            return Decision(
                Verdict.STOP,
                cause=f"needs {needed} blocks + watermark {watermark}, {free_blocks} are free",
            )
        return Decision(Verdict.ADMIT, demand.take)
