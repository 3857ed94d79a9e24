"""What the ranks of a tensor-parallel group exchange, whatever carries it.

Sums are taken in rank order, so that all ranks hold the same bits and a replay finds them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Shard(NamedTuple):
    """One rank's place in its group. 0 <= rank < size."""

    rank: int = 0
    size: int = 1


class Collectives(Protocol):
    """Every rank calls the same operations, in the same order, with the same shapes and dtypes.

    Tensors are contiguous and on the rank's device. Each raises GroupBroken when a peer has
    died, has given up or does not answer; the group is of no use afterwards.
    """

    shard: Shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x, in x itself, which is returned."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """x: [rows, width] -> on rank 0 [rows, size * width], the ranks side by side; else None."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x in everybody's x, which is returned."""


def sum_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of every rank's part, in fp32, as collective.cpp sums."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total


class GroupBroken(RuntimeError):
    """The group lost a rank; what it was computing is lost with it."""


class Alone:
    """A group of one: nothing to exchange."""

    shard = Shard()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x
