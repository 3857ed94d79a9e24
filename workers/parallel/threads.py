"""A group whose ranks are threads of one process: the same sharding and the same order of sums
as between processes, at the price of nothing but memory. For tests and for debugging."""

from __future__ import annotations

import threading

import torch

from workers.parallel.collectives import GroupBroken, Shard, sum_in_rank_order


class ThreadGroup:
    """Rank's view of the group that `thread_groups` makes."""

    def __init__(
        self, shard: Shard, barrier: threading.Barrier, slots: list[torch.Tensor | None]
    ) -> None:
        self.shard = shard
        self._barrier = barrier
        self._slots = slots

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = sum_in_rank_order(self._exchange(x))
        self._wait()
        return x.copy_(total)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = self._exchange(x)
        whole = torch.cat(parts, dim=-1) if self.shard.rank == 0 else None
        self._wait()
        return whole

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        first = self._exchange(x)[0]
        if self.shard.rank:
            x.copy_(first)
        self._wait()
        return x

    def give_up(self) -> None:
        """Make every rank's present and later call raise GroupBroken."""
        self._barrier.abort()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.shard.rank] = x
        self._wait()
        return [part for part in self._slots if part is not None]

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise GroupBroken("a rank of this process has failed") from error


def thread_groups(size: int) -> list[ThreadGroup]:
    """One connected group per rank; each is to be used by a thread of its own."""
    barrier = threading.Barrier(size)
    slots: list[torch.Tensor | None] = [None] * size
    return [ThreadGroup(Shard(rank, size), barrier, slots) for rank in range(size)]
