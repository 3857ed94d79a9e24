"""A group on one machine that exchanges through memory mapped by all of its processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

import torch

from workers.native.bindings import GroupView, load_group_calls
from workers.parallel.collectives import GroupBroken, Shard

CAPACITY_BYTES = 256 << 10
"""Of a rank's buffer, of which it has two. Larger tensors go in pieces; pieces that stay in the
second-level cache go faster."""
PATIENCE_S = 4.0
"""A peer that is this late has died or hangs: ranks do the same work at the same time."""


def create_memory(size: int, capacity: int = CAPACITY_BYTES) -> int:
    """File descriptor of zeroed memory for a group of `size`, without a name that could leak.

    Raises BuildError where the collectives cannot be compiled, OSError without the memory.
    """
    needed = load_group_calls().bytes(size, capacity)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("headway-group")
    else:
        handle, path = tempfile.mkstemp()
        os.unlink(path)
        fd = handle
    os.ftruncate(fd, needed)
    return fd


class SharedMemoryGroup:
    """One rank's view. Not thread-safe, but for `give_up`."""

    def __init__(
        self,
        shard: Shard,
        fd: int,
        capacity: int = CAPACITY_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """fd: from `create_memory`, in this process; may be closed afterwards."""
        self.shard = shard
        self._calls = load_group_calls()
        # Kept: the view points into it.
        self._memory = mmap.mmap(fd, self._calls.bytes(shard.size, capacity))
        self.view = GroupView(
            memory=ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
            capacity=capacity,
            patience_us=int(patience_s * 1e6),
            rank=shard.rank,
            size=shard.size,
        )
        self._group = ctypes.byref(self.view)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.check(self._calls.all_reduce[x.dtype](self._group, _pointer(x), x.numel()))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        rows, width = x.shape
        whole = x.new_empty(rows, width * self.shard.size) if self.shard.rank == 0 else None
        target = 0 if whole is None else whole.data_ptr()
        row_bytes = width * x.element_size()
        self.check(self._calls.gather(self._group, _pointer(x), rows, row_bytes, target))
        return whole

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self.check(self._calls.broadcast(self._group, _pointer(x), x.nbytes))
        return x

    def give_up(self) -> None:
        """Make every rank's present and later call raise GroupBroken. From any thread."""
        self._calls.give_up(self._group)

    def close(self) -> None:
        """Nothing to do: the memory goes with the last process that maps it."""

    def check(self, outcome: int) -> None:
        """Raise GroupBroken for what a compiled collective of this group returned but 0."""
        if outcome == 0:
            return
        if outcome < 0:
            raise GroupBroken("another rank of the group has failed")
        self.give_up()
        raise GroupBroken(
            f"rank {outcome - 1} has not answered for {self.view.patience_us / 1e6:g} s"
        )


def _pointer(x: torch.Tensor) -> int:
    if not x.is_contiguous():
        raise ValueError(f"a collective takes contiguous tensors, got strides {x.stride()}")
    return x.data_ptr()
