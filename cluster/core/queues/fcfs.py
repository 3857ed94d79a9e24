"""First come, first served."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from cluster.core.ids import SequenceId
from cluster.core.sequence import Sequence


class FcfsQueue:
    """Newcomers by arrival; returning sequences before them, by arrival among themselves."""

    name = "fcfs"

    def __init__(self) -> None:
        self._returning: list[Sequence] = []
        self._new: OrderedDict[SequenceId, Sequence] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._returning) + len(self._new)

    @property
    def tokens(self) -> int:
        return self._tokens

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returning
        yield from self._new.values()

    def push(self, sequence: Sequence) -> None:
        self._new[sequence.seq_id] = sequence
        self._tokens += sequence.total

    def push_returning(self, sequence: Sequence) -> None:
        insort(self._returning, sequence, key=lambda s: s.rank)
        self._tokens += sequence.total

    def peek(self) -> Sequence | None:
        if self._returning:
            return self._returning[0]
        return next(iter(self._new.values()), None)

    def take(self, sequence: Sequence) -> None:
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        if self._new.pop(sequence.seq_id, None) is None:
            self._returning.remove(sequence)
        self._tokens -= sequence.total

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Of no account here."""
