"""Who gives way when the pool is short. Candidates are of one priority: the lowest that runs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from cluster.core.sequence import Sequence


class VictimPolicy(Protocol):
    name: str

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """One of the candidates (at least one; none protected, none outranking another)."""


class LastAdmitted:
    """The one that came in last: the others are closer to their end, and the oldest always
    finishes (vLLM)."""

    name = "last-admitted"

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return max(candidates, key=lambda s: (s.admission, s.rank))


class NewestArrival:
    """The one that arrived last, however often it came in: strict first come, first served."""

    name = "newest-arrival"

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return max(candidates, key=lambda s: s.rank)


class LeastComputed:
    """The one that loses the fewest computed tokens; the newest of equals."""

    name = "least-computed"

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return min(candidates, key=lambda s: (s.computed, -s.rank))


class CheapestRecompute:
    """The one with the fewest tokens to compute again per block that it frees. Long sequences
    cost more per token to recompute (attention is quadratic), so tokens are weighted by
    1 + computed / `quadratic_at`, the length at which attention costs as much as the linear layers.
    """

    name = "cheapest-recompute"

    def __init__(self, quadratic_at: int = 16_384) -> None:
        self._quadratic_at = quadratic_at

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return min(candidates, key=lambda s: (self._cost_per_block(s), -s.rank))

    def _cost_per_block(self, sequence: Sequence) -> float:
        if not sequence.blocks:
            return float("inf")
        weight = 1.0 + sequence.computed / self._quadratic_at
        return sequence.computed * weight / len(sequence.blocks)
