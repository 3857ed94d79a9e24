"""Queues whose order is a fixed number per sequence: priority with aging, earliest deadline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

from cluster.core.errors import ConfigError
from cluster.core.sequence import Sequence

Key: TypeAlias = tuple[float, int]
"""(order, rank): the smaller goes first; the rank makes every key unique."""


class SortedSequences:
    """Sequences by key; O(log n) comparisons per change."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    @property
    def head(self) -> Sequence | None:
        return self._items[0] if self._items else None

    def add(self, key: Key, sequence: Sequence) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._items.insert(at, sequence)

    def discard(self, key: Key) -> bool:
        """False if nothing has that key."""
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            return False
        del self._keys[at], self._items[at]
        return True


class KeyedQueue(ABC):
    """Newcomers by key, and returning sequences by key before them, except where a newcomer
    passes. A key must not change while its sequence is alive."""

    def __init__(self) -> None:
        self._returning = SortedSequences()
        self._new = SortedSequences()
        self._tokens = 0

    @abstractmethod
    def key(self, sequence: Sequence) -> Key: ...

    @abstractmethod
    def passes(self, newcomer: Sequence, returning: Sequence) -> bool:
        """Whether the newcomer goes before a sequence that ran before."""

    @abstractmethod
    def outranks(self, waiting: Sequence, running: Sequence) -> bool: ...

    def __len__(self) -> int:
        return len(self._returning) + len(self._new)

    @property
    def tokens(self) -> int:
        return self._tokens

    def __iter__(self) -> Iterator[Sequence]:
        returning, newcomers = iter(self._returning), iter(self._new)
        back, fresh = next(returning, None), next(newcomers, None)
        while True:
            if fresh is not None and (back is None or self.passes(fresh, back)):
                yield fresh
                fresh = next(newcomers, None)
            elif back is not None:
                yield back
                back = next(returning, None)
            else:
                return

    def push(self, sequence: Sequence) -> None:
        self._new.add(self.key(sequence), sequence)
        self._tokens += sequence.total

    def push_returning(self, sequence: Sequence) -> None:
        self._returning.add(self.key(sequence), sequence)
        self._tokens += sequence.total

    def peek(self) -> Sequence | None:
        back, fresh = self._returning.head, self._new.head
        if fresh is not None and (back is None or self.passes(fresh, back)):
            return fresh
        return back

    def take(self, sequence: Sequence) -> None:
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        key = self.key(sequence)
        if not self._new.discard(key):
            self._returning.discard(key)
        self._tokens -= sequence.total

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Of no account here."""


class PriorityQueue(KeyedQueue):
    """Strict priority (the larger goes first) with aging: each `aging_s` seconds of age count as
    one level, so that the lowest is served in the end.

    A waiting sequence preempts a running one of a lower level, until the running one is so much
    older that its age makes up for it; equals never swap.
    """

    name = "priority"

    def __init__(self, aging_s: float) -> None:
        if not 0.001 <= aging_s <= 1e6:
            raise ConfigError(f"aging_s must be between 0.001 and 1e6, got {aging_s!r}")
        super().__init__()
        self._aging_s = aging_s

    def key(self, sequence: Sequence) -> Key:
        # Level now = priority + (now - arrival) / aging_s. Between two sequences `now` cancels.
        return (sequence.arrival_s / self._aging_s - sequence.priority, sequence.rank)

    def passes(self, newcomer: Sequence, returning: Sequence) -> bool:
        return newcomer.priority > returning.priority and self.key(newcomer) < self.key(returning)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.priority > running.priority and self.key(waiting) < self.key(running)


class DeadlineQueue(KeyedQueue):
    """Earliest deadline first: arrival + the request's own TTFT objective.

    default_objective_s: for requests that name none.
    """

    name = "deadline"

    def __init__(self, default_objective_s: float) -> None:
        if not 0.001 <= default_objective_s <= 1e6:
            raise ConfigError(
                f"default_objective_s must be between 0.001 and 1e6, got {default_objective_s!r}"
            )
        super().__init__()
        self._default_objective_s = default_objective_s

    def key(self, sequence: Sequence) -> Key:
        objective_s = sequence.ttft_objective_s
        if objective_s is None:
            objective_s = self._default_objective_s
        return (sequence.arrival_s + objective_s, sequence.rank)

    def passes(self, newcomer: Sequence, returning: Sequence) -> bool:
        return False

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False
