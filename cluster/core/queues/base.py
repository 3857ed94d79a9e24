"""What every waiting queue is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cluster.core.sequence import Sequence


class WaitingQueue(Protocol):
    """Waiting sequences in the order of a policy. Those that ran before come first within their
    priority. Iterating shows the order in which take() of one after the other would go, and
    changes nothing."""

    name: str

    def __len__(self) -> int: ...

    @property
    def tokens(self) -> int:
        """Tokens (prompt + emitted) of all that wait, in O(1)."""

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence) -> None:
        """A newcomer."""

    def push_returning(self, sequence: Sequence) -> None:
        """A sequence that was preempted or paused."""

    def peek(self) -> Sequence | None:
        """The first of the order."""

    def take(self, sequence: Sequence) -> None:
        """It comes in. Almost always the first of the order; O(1) or O(log n) then."""

    def remove(self, sequence: Sequence) -> None:
        """It leaves without having come in."""

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether `running` has to give way so that `waiting` may come in. Never between equals."""

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Tokens that were emitted for it since it came in."""
