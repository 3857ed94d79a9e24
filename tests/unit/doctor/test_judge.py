"""What facts mean, and what the doctor says to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.doctor.compare import differences
from cluster.doctor.facts import Gpu, GpuFacts, KernelFacts, NodeFacts, Package, RoomFacts
from cluster.doctor.judge import findings
from cluster.findings import Level

GIB = 1 << 30
ROOM = RoomFacts(
    memory_free=16 * GIB,
    memory_total=32 * GIB,
    shm_free=8 * GIB,
    shm_total=16 * GIB,
    disk_free=50 * GIB,
    cache="/cache",
    cache_problem="",
    model_bytes=600 << 20,
    open_files=65536,
)
NODE = NodeFacts(
    host="a",
    python="3.11.7",
    headway="0.1.0",
    code="c0de",
    packages=(
        Package("ray[serve]", "2.60.1", "<2.61,>=2.60"),
        Package("torch", "2.13.0+cpu", "<2.14,>=2.4"),
    ),
    gpu=GpuFacts(),
    kernels=KernelFacts("avx2", "/usr/bin/g++", ""),
    room=ROOM,
    cores=8,
    clock_s=1000.0,
    clock_synced=True,
    own_name_s=0.01,
    ports={"front door 127.0.0.1:50051": ""},
)
CARD = "NVIDIA H200, 143771 MiB, 570.86"
USABLE = GpuFacts((CARD,), "570.86", (Gpu("NVIDIA H200", 139 * GIB, "9.0"),), "12.8", "2.27.3")


def worst(node: NodeFacts) -> Level:
    levels = {finding.level for finding in findings(node)}
    return next(level for level in (Level.PROBLEM, Level.WARNING, Level.OK) if level in levels)


def test_a_healthy_node_has_nothing_to_do():
    assert worst(NODE) is Level.OK
    assert all(not finding.advice for finding in findings(NODE))
    told = " ".join(finding.message for finding in findings(NODE))
    assert "none: engines run on the CPU" in told
    assert "torch 2.13.0+cpu" in told


def test_a_gpu_is_named_with_driver_cuda_and_nccl():
    node = replace(NODE, gpu=USABLE)
    told = {finding.subject: finding.message for finding in findings(node)}
    assert worst(node) is Level.OK
    for part in ("NVIDIA H200 (139.0 GiB", "capability 9.0", "driver 570.86", "CUDA 12.8"):
        assert part in told["GPU"]
    assert told["NCCL"] == "2.27.3"


@pytest.mark.parametrize(
    ("change", "level", "part", "advice"),
    [
        ({"python": "3.14.0"}, Level.PROBLEM, "3.14.0 is not supported", "3.10 up to"),
        ({"headway": "unknown"}, Level.WARNING, "not installed", "pip install"),
        (
            {"packages": (Package("ray[serve]", "2.50.0", "<2.61,>=2.60"),)},
            Level.WARNING,
            "ray[serve] 2.50.0 is outside",
            'pip install "ray[serve]<2.61,>=2.60"',
        ),
        (
            {"packages": (Package("msgspec", None, ">=0.19"),)},
            Level.PROBLEM,
            "msgspec is not installed",
            "pip install",
        ),
        ({"gpu": GpuFacts((CARD,), "570.86")}, Level.PROBLEM, "build for the CPU", "CUDA wheels"),
        (
            {"gpu": GpuFacts((CARD,), "470.1", (), "12.8", "2.27.3")},
            Level.PROBLEM,
            "cannot use it",
            "driver",
        ),
        (
            {"gpu": replace(USABLE, seen=(CARD, CARD))},
            Level.WARNING,
            "torch can use 1",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            {"gpu": replace(USABLE, usable=USABLE.usable * 2, nccl="")},
            Level.PROBLEM,
            "torch has none",
            "CUDA build",
        ),
        ({"kernels": KernelFacts("avx2", "", "")}, Level.WARNING, "no C++ compiler", "g++"),
        ({"room": replace(ROOM, memory_free=GIB)}, Level.PROBLEM, "1.0 GiB of", "free some"),
        (
            {"room": replace(ROOM, shm_free=64 << 20)},
            Level.PROBLEM,
            "64 MiB of 16.0 GiB free",
            "--shm-size",
        ),
        ({"room": replace(ROOM, shm_free=None)}, Level.WARNING, "no /dev/shm", "Ray"),
        (
            {"room": replace(ROOM, disk_free=1 << 20)},
            Level.PROBLEM,
            "takes 600 MiB",
            "HEADWAY_CACHE",
        ),
        (
            {"room": replace(ROOM, cache_problem="/cache: Read-only file system")},
            Level.PROBLEM,
            "Read-only",
            "HEADWAY_CACHE",
        ),
        (
            {"room": replace(ROOM, cache_problem="/cache: Read-only file system", model_bytes=0)},
            Level.WARNING,
            "Read-only",
            "HEADWAY_CACHE",
        ),
        ({"room": replace(ROOM, open_files=4096)}, Level.WARNING, "4096 at most", "ulimit -n"),
        ({"room": replace(ROOM, open_files=256)}, Level.PROBLEM, "256 at most", "ulimit -n"),
        (
            {"ports": {"front door 127.0.0.1:50051": "Address already in use"}},
            Level.WARNING,
            "front door 127.0.0.1:50051: Address already in use",
            "stop it",
        ),
        ({"clock_synced": False}, Level.WARNING, "not synchronised", "chrony"),
        ({"own_name_s": 10.0}, Level.WARNING, "a, looked up in 10.0 s", "ADDRESS a` in /etc/hosts"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(change, level, part, advice):
    node = replace(NODE, **change)
    assert worst(node) is level
    (said,) = (f for f in findings(node) if part in f.message)
    assert said.level is level
    assert advice in said.advice


def test_a_compiler_is_not_missed_where_kernels_are_compiled_or_not_needed():
    built = replace(NODE, kernels=KernelFacts("avx2", "", "/cache/native/kernels.so"))
    on_gpu = replace(NODE, kernels=KernelFacts("avx2", "", ""), gpu=USABLE)
    assert worst(built) is worst(on_gpu) is Level.OK


def test_nodes_alike_differ_in_nothing():
    (one,) = differences({"a": NODE, "b": replace(NODE, host="b")}, {"a": 0.0, "b": -0.4})
    assert one.level is Level.OK
    assert one.message == "2 with the same versions"


@pytest.mark.parametrize(
    ("change", "level", "message"),
    [
        ({"python": "3.12.1"}, Level.PROBLEM, "3.11 on a; 3.12 on b"),
        ({"code": "other"}, Level.PROBLEM, "c0de on a; other on b"),
        (
            {"packages": (Package("ray[serve]", "2.60.0", ""), NODE.packages[1])},
            Level.PROBLEM,
            "2.60.1 on a; 2.60.0 on b",
        ),
        (
            {"packages": (NODE.packages[0],)},
            Level.WARNING,
            "2.13.0+cpu on a; none on b",
        ),
    ],
)
def test_nodes_that_differ_are_told_apart(change, level, message):
    found = differences({"a": NODE, "b": replace(NODE, **change)}, {})
    assert [(f.level, f.message) for f in found] == [(level, message)]


def test_a_patch_of_python_is_no_difference_and_a_clock_that_is_off_is():
    found = differences({"a": NODE, "b": replace(NODE, python="3.11.9")}, {"b": -7.25})
    assert [(f.level, f.message) for f in found] == [(Level.WARNING, "b is -7.2 s from here")]
