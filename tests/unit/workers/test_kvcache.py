from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from workers import memory
from workers.kvcache import CacheShape, allocate, choose_num_blocks

SHAPE = CacheShape(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)


def config(**values) -> WorkerConfig:
    return WorkerConfig(model="m", **values)


def test_bytes_by_hand():
    assert SHAPE.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert SHAPE.bytes_per_block == 16 * SHAPE.bytes_per_token


def test_share_of_free_memory_leaves_room_for_the_null_block():
    free = 1000 * SHAPE.bytes_per_block
    assert choose_num_blocks(config(kv_memory_share=0.5), SHAPE, 8192, free) == 499


def test_never_more_than_all_sequences_could_use():
    free = 10**6 * SHAPE.bytes_per_block
    assert choose_num_blocks(config(max_num_seqs=4), SHAPE, 100, free) == 4 * 7


def test_configured_blocks_are_taken_as_they_are():
    assert choose_num_blocks(config(num_blocks=3), SHAPE, 8192, 4 * SHAPE.bytes_per_block) == 3


def test_configured_blocks_beyond_the_memory_are_refused():
    with pytest.raises(ConfigError, match=r"num_blocks 4 needs \d+ bytes .*only \d+ are free"):
        choose_num_blocks(config(num_blocks=4), SHAPE, 8192, 4 * SHAPE.bytes_per_block)


def test_share_without_room_for_one_short_sequence_is_refused():
    with pytest.raises(ConfigError, match=r"kv_memory_share 0\.3 .* 5 blocks .*at least 8"):
        choose_num_blocks(config(), SHAPE, 8192, 20 * SHAPE.bytes_per_block + 1)
    assert choose_num_blocks(config(), SHAPE, 80, 20 * SHAPE.bytes_per_block + 1) == 5


def test_allocation_has_the_null_block_and_separate_memory():
    shape = CacheShape(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype=torch.float32)
    caches = allocate(shape, 5, torch.device("cpu"))
    tensors = [tensor for cache in caches for tensor in cache]
    assert [tuple(t.shape) for t in tensors] == [(6, 4, 3, 8)] * 4
    assert len({t.data_ptr() for t in tensors}) == 4
    assert sum(t.nbytes for t in tensors) == 6 * shape.bytes_per_block


# -- cgroups -----------------------------------------------------------------------------------


def write_group(folder: Path, limit: str, usage: int, cache: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def membership(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def test_version_2_limits_of_all_parents_count(tmp_path):
    root = tmp_path / "fs"
    write_group(root / "pod" / "container", "1000", 700, 100)
    write_group(root / "pod", "5000", 4900, 0)
    rooms = memory.cgroup_rooms(root, membership(tmp_path, "0::/pod/container\n"))
    assert sorted(rooms) == [100, 400]


def test_version_2_without_a_limit(tmp_path):
    root = tmp_path / "fs"
    write_group(root / "pod", "max", 700, 100)
    assert memory.cgroup_rooms(root, membership(tmp_path, "0::/pod\n")) == []


def test_container_sees_its_group_at_the_root(tmp_path):
    root = tmp_path / "fs"
    write_group(root, "1000", 300, 0)
    rooms = memory.cgroup_rooms(root, membership(tmp_path, "0::/kubepods/not/mounted\n"))
    assert rooms == [700]


def test_version_1(tmp_path):
    root = tmp_path / "fs"
    write_group(root / "memory" / "docker" / "x", "1000", 1200, 50, version=1)
    text = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"
    assert memory.cgroup_rooms(root, membership(tmp_path, text)) == [0]


def test_no_cgroups(tmp_path):
    assert memory.cgroup_rooms(tmp_path, tmp_path / "missing") == []


def test_this_machine_has_memory():
    assert memory.free_memory(torch.device("cpu")) > 0
    assert memory.resident_bytes() > 0
