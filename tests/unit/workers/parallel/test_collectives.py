"""Every carrier of a group does the same: sums in rank order, gathers, broadcasts, gives up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from workers.native.build import BuildError
from workers.parallel import shm
from workers.parallel.collectives import Alone, GroupBroken, Shard
from workers.parallel.shm import SharedMemoryGroup
from workers.parallel.threads import thread_groups

Groups = list[Any]


def shared_memory_groups(
    size: int, capacity: int = shm.CAPACITY_BYTES, patience_s: float = shm.PATIENCE_S
) -> Groups:
    """Ranks in one process, each with a mapping of its own, as in several processes."""
    try:
        fd = shm.create_memory(size, capacity)
    except BuildError as error:
        pytest.skip(str(error))
    try:
        return [SharedMemoryGroup(Shard(r, size), fd, capacity, patience_s) for r in range(size)]
    finally:
        os.close(fd)


def on_all(groups: Groups, work: Callable[[Any], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.fixture(params=["shm", "threads"])
def make(request) -> Callable[[int], Groups]:
    return shared_memory_groups if request.param == "shm" else thread_groups


def parts(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    # Of very unequal size, so that the order of the sum shows in its bits.
    return [
        (torch.randn(shape, generator=generator) * 10.0**r).to(dtype) for r in range(-1, size - 1)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (16, 512), (301, 577)], ids=str)
def test_sums_have_the_bits_of_the_sum_in_rank_order_on_every_rank(make, size, dtype, shape):
    given = parts(size, *shape, dtype=dtype)
    total = given[0].float()
    for part in given[1:]:
        total = total + part.float()
    groups = make(size)
    for _ in range(3):
        found = on_all(groups, lambda g: g.all_reduce(given[g.shard.rank].clone()))
        assert all(torch.equal(x, total.to(dtype)) for x in found)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("capacity", [64, 192, shm.CAPACITY_BYTES])
def test_tensors_larger_than_the_buffer_go_in_pieces(size, capacity):
    groups = shared_memory_groups(size, capacity)
    given = parts(size, 7, 45)
    sums = on_all(groups, lambda g: g.all_reduce(given[g.shard.rank].clone()))
    expected = given[0].clone()
    for part in given[1:]:
        expected += part
    assert all(torch.equal(x, expected) for x in sums)
    wholes = on_all(groups, lambda g: g.gather(given[g.shard.rank]))
    assert torch.equal(wholes[0], torch.cat(given, dim=-1))
    assert wholes[1:] == [None] * (size - 1)
    spread = on_all(groups, lambda g: g.broadcast(given[g.shard.rank].clone()))
    assert all(torch.equal(x, given[0]) for x in spread)


@pytest.mark.parametrize("size", [2, 4])
def test_mixed_operations_follow_each_other_without_a_mix_up(make, size):
    """Buffers are used again at once: nobody may be overtaken."""
    groups = make(size)

    def work(group: Any) -> bool:
        rank = group.shard.rank
        for turn in range(200):
            x = torch.full((1 + turn % 9,), float(rank + turn))
            if not torch.equal(group.all_reduce(x), torch.full_like(x, _sum(turn, size))):
                return False
            ids = torch.tensor([turn * 3 + rank], dtype=torch.int32)
            if group.broadcast(ids).tolist() != [turn * 3]:
                return False
            whole = group.gather(torch.full((2, 1), float(rank)))
            if rank == 0 and whole.tolist() != [[float(r) for r in range(size)]] * 2:
                return False
            if turn % 50 == rank * 10:
                time.sleep(0.002)
        return True

    assert all(on_all(groups, work))


def _sum(turn: int, size: int) -> float:
    return float(sum(rank + turn for rank in range(size)))


def test_giving_up_wakes_those_who_wait_and_stays(make):
    first, second = make(2)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            first.all_reduce(torch.ones(4))
        except GroupBroken as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    second.give_up()
    waiting.join(2.0)
    assert not waiting.is_alive()
    assert len(outcome) == 1
    with pytest.raises(GroupBroken):
        second.all_reduce(torch.ones(4))


def test_a_rank_that_does_not_come_is_named_after_the_patience():
    first, _second, _third = shared_memory_groups(3, patience_s=0.2)
    began = time.monotonic()
    with pytest.raises(GroupBroken, match=r"rank 1 has not answered for 0\.2 s"):
        first.all_reduce(torch.ones(4))
    assert 0.15 < time.monotonic() - began < 2.0


def test_memory_has_no_name_that_could_leak():
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    groups = shared_memory_groups(2)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert not {name for name in after - before if "headway" in name}
    assert len(groups) == 2


def test_strided_tensors_are_refused():
    (alone,) = shared_memory_groups(1)
    with pytest.raises(ValueError, match="contiguous"):
        alone.all_reduce(torch.ones(4, 4).t())


def test_a_group_of_one_exchanges_nothing():
    x = torch.ones(2, 2)
    assert Alone().all_reduce(x) is x
    assert Alone().gather(x) is x
    assert Alone().broadcast(x) is x
