"""What settings mean on one machine: is there room for all of it, and for how much work?

Pure: the numbers come from `workers.footprint` and from the machine, the judgement from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.findings import Finding, mebibytes, ok, problem, warning
from cluster.settings import ServeSettings

if TYPE_CHECKING:
    from workers.footprint import Footprint

BASE_BYTES = 2 << 30
"""Ray, a router and an engine's program, without model and KV cache."""
PROCESS_BYTES = 400 << 20
"""Each further engine, rank or router. Resident were 340 MiB of an engine with a tiny model and
150 MiB of a router."""
SHORT_SEQUENCE_TOKENS = 128
"""With room for less, no ordinary request could ever finish."""
USUAL_SEQUENCE_TOKENS = 1024
SHM_BYTES = 128 << 20
"""Ray's object store, which tokens do not go through."""
NCCL_SHM_BYTES = 64 << 20
"""Of a rank: NCCL's buffers where GPUs have no direct way to each other."""


@dataclass(frozen=True, slots=True)
class Machine:
    """memory_bytes: free in main memory, cgroups considered. shm_bytes: free in /dev/shm, None
    without one. cores: that this process may use."""

    memory_bytes: int
    shm_bytes: int | None
    cores: int


@dataclass(frozen=True, slots=True)
class Demand:
    """Of everything that is to run on one machine, in bytes. gpus: how many."""

    memory_bytes: int
    shm_bytes: int
    gpus: int


def engines_of(settings: ServeSettings) -> int:
    """How many may run at a time."""
    return settings.engines if settings.scaling is None else settings.scaling.max_engines


def demand(settings: ServeSettings, one: Footprint) -> Demand:
    """one: rank's footprint."""
    ranks = engines_of(settings) * one.ranks
    on_gpu = settings.gpus_per_rank > 0
    swapped = settings.policies.host_blocks * one.block_bytes
    processes = ranks + settings.routers - 2
    in_memory = 0 if on_gpu else one.rank_bytes
    shm = SHM_BYTES + (NCCL_SHM_BYTES * ranks if on_gpu and one.ranks > 1 else 0)
    memory = BASE_BYTES + processes * PROCESS_BYTES + ranks * (in_memory + swapped)
    return Demand(memory, shm, ranks if on_gpu else 0)


def capacity_findings(
    settings: ServeSettings, one: Footprint, machine: Machine
) -> Iterator[Finding]:
    """Everything that follows from the settings; what is impossible is a problem."""
    yield from _room(settings, one, machine)
    yield from _cache(settings, one)
    yield from _steps(settings, one, machine)


def _room(settings: ServeSettings, one: Footprint, machine: Machine) -> Iterator[Finding]:
    need, engines = demand(settings, one), engines_of(settings)
    yield ok(
        "rank",
        f"{mebibytes(one.weight_bytes)} of weights as {one.dtype} and "
        f"{mebibytes(one.kv_bytes)} of KV cache on {one.device}; {one.ranks} per engine",
    )
    if need.gpus > one.gpus:
        yield problem(
            "GPUs",
            f"{engines} engine(s) of {one.ranks} rank(s) need {need.gpus}, {one.gpus} are here",
            "lower engines or tensor_parallel_size",
        )
    elif need.gpus:
        yield ok("GPUs", f"{need.gpus} needed, {one.gpus} here")
    text = f"about {mebibytes(need.memory_bytes)} needed, {mebibytes(machine.memory_bytes)} free"
    if need.memory_bytes > machine.memory_bytes:
        advice = "lower engines, num_blocks or kv_memory_share, or serve a smaller model"
        yield problem("memory", text, advice)
    else:
        yield ok("memory", text)
    if machine.shm_bytes is None:
        return
    text = f"{mebibytes(need.shm_bytes)} needed, {mebibytes(machine.shm_bytes)} free in /dev/shm"
    if need.shm_bytes > machine.shm_bytes:
        yield problem("shared memory", text, "start the container with --shm-size=1g or free it")
    else:
        yield ok("shared memory", text)


def _cache(settings: ServeSettings, one: Footprint) -> Iterator[Finding]:
    yield ok(
        "KV cache",
        f"{one.num_blocks} blocks of {one.block_size} tokens ({one.block_bytes} bytes per rank) = "
        f"{one.kv_tokens} tokens per engine: {one.sequences(one.max_model_len)} sequences of "
        f"{one.max_model_len} (max_model_len), {one.sequences(USUAL_SEQUENCE_TOKENS)} of "
        f"{USUAL_SEQUENCE_TOKENS}",
    )
    least = min(one.max_model_len, SHORT_SEQUENCE_TOKENS)
    advice = "raise num_blocks or kv_memory_share, or lower max_model_len"
    if one.kv_tokens < least:
        yield problem(
            "KV cache",
            f"num_blocks {one.num_blocks} of block_size {one.block_size} hold {one.kv_tokens} "
            f"tokens, one sequence needs at least {least}",
            advice,
        )
    elif one.longest_sequence < one.max_model_len:
        yield warning(
            "KV cache",
            f"requests of more than {one.longest_sequence} tokens are refused, though "
            f"max_model_len is {one.max_model_len}",
            advice,
        )
    elif one.num_blocks < settings.worker.max_num_seqs:
        yield warning(
            "KV cache",
            f"max_num_seqs is {settings.worker.max_num_seqs}, but each sequence takes a block and "
            f"there are {one.num_blocks}",
            "lower max_num_seqs or raise num_blocks",
        )


def _steps(settings: ServeSettings, one: Footprint, machine: Machine) -> Iterator[Finding]:
    worker = settings.worker
    if worker.max_num_batched_tokens < worker.max_num_seqs:
        yield warning(
            "budget",
            f"max_num_batched_tokens {worker.max_num_batched_tokens} is below max_num_seqs "
            f"{worker.max_num_seqs}: running sequences take turns",
            "raise it to max_num_seqs at least",
        )
    if one.heads % one.ranks or (one.kv_heads % one.ranks and one.ranks % one.kv_heads):
        yield warning(
            "heads",
            f"{one.heads} query and {one.kv_heads} KV heads do not divide by "
            f"tensor_parallel_size {one.ranks}: ranks compute zeros in place of what lacks",
            "take a size that divides both",
        )
    elif one.ranks > one.kv_heads:
        yield warning(
            "heads",
            f"tensor_parallel_size {one.ranks} is above the {one.kv_heads} KV heads: "
            "each is kept several times",
        )
    threads = engines_of(settings) * one.ranks * worker.threads
    if settings.gpus_per_rank == 0 and threads > machine.cores:
        yield warning(
            "cores",
            f"{threads} computing threads on {machine.cores} cores: each step waits for the "
            "slowest",
            "lower threads, engines or tensor_parallel_size",
        )
