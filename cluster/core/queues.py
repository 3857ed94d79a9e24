"""Who is next: the order in which waiting sequences are offered to admission."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from cluster.core.ids import SequenceId
from cluster.core.sequence import Sequence


class WaitingQueue(Protocol):
    """Waiting sequences in the order of a policy. Those that ran before come first."""

    def __len__(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Tokens (prompt + emitted) of all that wait, in O(1)."""

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence) -> None:
        """A newcomer."""

    def push_returning(self, sequence: Sequence) -> None:
        """A sequence that was preempted or paused; goes before every newcomer."""

    def peek(self) -> Sequence | None: ...

    def pop(self) -> Sequence:
        """Take out the sequence that peek() shows."""

    def remove(self, sequence: Sequence) -> None: ...


class FcfsQueue:
    """First come, first served; returning sequences first, by arrival among themselves."""

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

    def pop(self) -> Sequence:
        sequence = self._returning.pop(0) if self._returning else self._new.popitem(last=False)[1]
        self._tokens -= sequence.total
        return sequence

    def remove(self, sequence: Sequence) -> None:
        if self._new.pop(sequence.seq_id, None) is None:
            self._returning.remove(sequence)
        self._tokens -= sequence.total
