"""Sums over two processes: shared memory against gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch

from workers.bench_cpu.turns import Comparison, compare, take_turns
from workers.native import bindings
from workers.parallel.collectives import Shard
from workers.parallel.shm import SharedMemoryGroup, create_memory
from workers.parallel.torchdist import TorchGroup, create_store

SHAPES = ((16, 512), (576, 512))
TARGET = 0.1
"""Of the first shape, that of a decode step; a chunk's sum is a matter of memory speed."""
_SIZE = 2


def bench_collectives(dtype: str, rounds: int) -> list[Comparison]:
    """The other rank is this module as a command: it takes the same turns."""
    fd, store = create_memory(_SIZE), create_store(_SIZE)
    other = subprocess.Popen(
        [sys.executable, "-m", __name__, str(fd), str(store.port), dtype, str(rounds)],
        pass_fds=[fd],
        stdout=subprocess.PIPE,
    )
    try:
        # gloo waits for a few seconds only, and importing torch may take longer.
        if other.stdout is None or not other.stdout.readline():
            raise RuntimeError("the other rank did not start")
        gloo = TorchGroup(Shard(0, _SIZE), "gloo", store)
        try:
            return _measure((SharedMemoryGroup(Shard(0, _SIZE), fd), gloo), dtype, rounds)
        finally:
            gloo.close()
    finally:
        os.close(fd)
        other.kill()
        other.communicate()


def _measure(
    groups: tuple[SharedMemoryGroup, TorchGroup], dtype: str, rounds: int
) -> list[Comparison]:
    shared, gloo = groups
    found: list[Comparison] = []
    for shape in SHAPES:
        x = torch.zeros(shape, dtype=getattr(torch, dtype))
        ways: dict[str, Callable[[], object]] = {
            "shm": partial(shared.all_reduce, x),
            "gloo": partial(gloo.all_reduce, x),
        }
        times = take_turns(ways, rounds)
        target = TARGET if shape == SHAPES[0] else 0.0
        found.append(compare(f"all-reduce of {list(shape)}", dtype, times, ("shm", "gloo"), target))
    return found


def main() -> None:
    fd, port, dtype, rounds = sys.argv[1:]
    shard = Shard(1, _SIZE)
    bindings.load_group_calls()
    shared = SharedMemoryGroup(shard, int(fd))
    print("ready", flush=True)
    gloo = TorchGroup.join(shard, "gloo", int(port))
    _measure((shared, gloo), dtype, int(rounds))
    gloo.close()


if __name__ == "__main__":
    main()
