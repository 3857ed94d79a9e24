"""What settings mean on a machine, judged by numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.capacity import Machine, capacity_findings, demand
from cluster.config.load import load_settings
from cluster.findings import Finding, Level
from cluster.settings import ServeSettings
from workers.footprint import Footprint

GIB = 1 << 30
ONE = Footprint(
    device="cpu",
    dtype="bfloat16",
    ranks=1,
    weight_bytes=GIB,
    block_bytes=1 << 20,
    block_size=16,
    num_blocks=1023,
    max_model_len=4096,
    heads=8,
    kv_heads=4,
    free_bytes=32 * GIB,
    gpus=0,
)
BIG = Machine(memory_bytes=32 * GIB, shm_bytes=GIB, cores=8)


def settings(gpus: int = 0, **flags: str) -> ServeSettings:
    typed = {name.replace("__", "."): value for name, value in flags.items()}
    return load_settings(None, typed, {}).settings(Path("/m"), gpus)


def found(
    given: ServeSettings, one: Footprint = ONE, machine: Machine = BIG, level: Level = Level.PROBLEM
) -> list[Finding]:
    return [f for f in capacity_findings(given, one, machine) if f.level is level]


def test_what_fits_is_told_in_tokens_and_sequences():
    given = settings()
    assert not found(given)
    assert not found(given, level=Level.WARNING)
    (cache,) = (f for f in found(given, level=Level.OK) if f.subject == "KV cache")
    for fact in (
        "1023 blocks of 16 tokens",
        "1048576 bytes",
        "16368 tokens",
        "3 sequences of 4096",
        "15 of 1024",
    ):
        assert fact in cache.message


def test_all_engines_of_the_machine_count():
    """2 GiB each, 2 GiB for Ray and the first processes, 400 MiB for each further one."""
    given = settings(fleet__engines="4", fleet__routers="2")
    assert demand(given, ONE).memory_bytes == 10 * GIB + 4 * (400 << 20)
    (memory,) = found(given, machine=replace(BIG, memory_bytes=11 * GIB))
    assert memory.subject == "memory"
    assert "11.6 GiB needed, 11.0 GiB free" in memory.message
    assert "engines" in memory.advice


def test_with_autoscaling_the_most_engines_count():
    given = settings(autoscaling__max_engines="3")
    assert demand(given, ONE).memory_bytes == 8 * GIB + 2 * (400 << 20)


def test_ranks_share_weights_and_swapped_blocks_take_memory():
    given = settings(scheduling__preemption="swap", scheduling__host_blocks="1024")
    assert demand(given, ONE).memory_bytes == 2 * GIB + 2 * GIB + GIB
    half = replace(ONE, ranks=2, weight_bytes=GIB // 2, block_bytes=1 << 19)
    assert demand(settings(), half).memory_bytes == 2 * GIB + 2 * GIB + (400 << 20)


def test_on_gpus_cards_are_counted_and_main_memory_holds_no_model():
    given = settings(gpus=1, fleet__engines="2")
    two = replace(ONE, device="cuda", ranks=2, gpus=4)
    assert not found(given, two)
    assert demand(given, two).memory_bytes == 2 * GIB + 3 * (400 << 20)
    (cards,) = found(given, replace(two, gpus=3))
    assert cards.message == "2 engine(s) of 2 rank(s) need 4, 3 are here"


@pytest.mark.parametrize(("shm", "refused"), [(64 << 20, True), (None, False), (GIB, False)])
def test_shared_memory(shm, refused):
    problems = found(settings(), machine=replace(BIG, shm_bytes=shm))
    assert [f.subject for f in problems] == (["shared memory"] if refused else [])
    assert all("--shm-size" in f.advice for f in problems)


def test_a_cache_without_room_for_one_short_sequence_is_refused():
    (problem,) = found(settings(), replace(ONE, num_blocks=7))
    assert "num_blocks 7 of block_size 16 hold 112 tokens" in problem.message
    assert not found(settings(), replace(ONE, num_blocks=8))
    assert not found(settings(), replace(ONE, num_blocks=4, max_model_len=64))


@pytest.mark.parametrize(
    ("given", "one", "part"),
    [
        ({}, {"num_blocks": 128}, "requests of more than 2048 tokens are refused"),
        ({"engine__max_num_seqs": "2000"}, {}, "each sequence takes a block and there are 1023"),
        ({"engine__max_num_batched_tokens": "16"}, {}, "below max_num_seqs 32"),
        ({"engine__tensor_parallel_size": "3"}, {"ranks": 3}, "8 query and 4 KV heads"),
        ({"engine__tensor_parallel_size": "8"}, {"ranks": 8}, "above the 4 KV heads"),
        ({"engine__threads": "9"}, {}, "9 computing threads on 8 cores"),
    ],
)
def test_what_works_but_hardly_is_meant_is_a_warning(given, one, part):
    warned = found(settings(**given), replace(ONE, **one), level=Level.WARNING)
    assert part in "\n".join(f.message for f in warned)
    assert not found(settings(**given), replace(ONE, **one))
