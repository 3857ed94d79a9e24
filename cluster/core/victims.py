"""Who gives way when the pool is short."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from cluster.core.sequence import Sequence


class VictimPolicy(Protocol):
    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        """One of the candidates (at least one, none of them protected)."""


class NewestFirst:
    """The newest arrival gives way, so that no victim outranks a sequence it makes room for,
    and the oldest always finishes."""

    def choose(self, candidates: SequenceOf[Sequence]) -> Sequence:
        return max(candidates, key=lambda s: s.rank)
