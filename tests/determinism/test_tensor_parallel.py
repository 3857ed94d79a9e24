"""Executors of a group: the tokens of one rank, and the end of all when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError, ModelError
from cluster.core.plan import NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from tests.determinism.plan_driver import Driving, PlanDriver, Request
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.executors import check_config, make_executor
from workers.models.compiled import CompiledLayers
from workers.parallel import crew
from workers.parallel.collectives import GroupBroken
from workers.parallel.executor import GroupExecutor
from workers.parallel.launch import RankProcess, launch_process

VOCAB = 131
NOTICED_S = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    spec = TinyLlama(hidden=72, heads=9, kv_heads=3, intermediate=100, vocab=VOCAB)
    return write_model(tmp_path_factory.mktemp("tp"), spec, shards=3)


@pytest.fixture(scope="module")
def whole_tiles(tmp_path_factory) -> Path:
    """Of sizes that let the compiled kernels run all layers in one call, sums included."""
    spec = TinyLlama(
        hidden=96, heads=9, kv_heads=3, head_dim=32, intermediate=288, vocab=VOCAB, max_len=512
    )
    return write_model(tmp_path_factory.mktemp("whole"), spec)


def config(folder: Path, size: int, collectives: str = "auto", **options: Any) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder),
        device="cpu",
        num_blocks=80,
        tensor_parallel_size=size,
        collectives=collectives,
        **options,
    )


def requests() -> list[Request]:
    """Greedy and seeded, with log-probabilities, a stop that is drawn, penalties and bans."""
    return [
        Request(
            [(7 * n + 3 * i) % VOCAB for i in range(5 + 9 * n)],
            SamplingParams(
                max_tokens=20,
                temperature=0.9 * (n % 2),
                top_k=20 * (n % 3),
                seed=n,
                logprobs=3 if n == 2 else None,
                stop_token_ids=tuple(range(5)) if n == 1 else (),
                frequency_penalty=0.8 if n in (3, 4) else 0.0,
                repetition_penalty=1.4 if n == 4 else 1.0,
                allowed_token_ids=tuple(range(50, 90)) if n == 5 else (),
            ),
        )
        for n in range(6)
    ]


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    executor = make_executor(config(folder, 1))
    return PlanDriver(executor, Driving(budget=512, batch=8)).run(requests())


@pytest.mark.parametrize(
    ("size", "collectives"),
    [(2, "shm"), (4, "shm"), (2, "gloo"), (2, "local"), (3, "local"), (4, "local")],
)
def test_tokens_are_those_of_one_rank_also_in_chunks_and_after_replays(
    folder, expected, size, collectives
):
    executor = make_executor(config(folder, size, collectives))
    try:
        assert executor.problem() is None
        for driving in (Driving(512, 8), Driving(17, 4, replay_every=5)):
            assert PlanDriver(executor, driving).run(requests()) == expected
        assert executor.problem() is None
    finally:
        executor.close()


def runs_compiled(executor: Any) -> bool:
    model = executor._shard._runner._passes._loaded.model
    return isinstance(model._layers, CompiledLayers)


def test_ranks_that_sum_within_one_call_agree_with_one_rank(whole_tiles):
    one = make_executor(config(whole_tiles, 1))
    expected = PlanDriver(one, Driving(budget=512, batch=8)).run(requests())
    group = make_executor(config(whole_tiles, 3, "shm"))
    try:
        if not runs_compiled(group):
            pytest.skip("no kernels here")
        driving = Driving(17, 4, replay_every=5)
        assert PlanDriver(group, driving).run(requests()) == expected
    finally:
        group.close()


def test_sizes_are_told_for_all_ranks_together(folder):
    one = make_executor(config(folder, 1))
    two = make_executor(config(folder, 2, "local"))
    # Three KV heads become four, and 131 rows of the vocabulary 160.
    assert two.info.kv_bytes_per_token * 3 == one.info.kv_bytes_per_token * 4
    assert one.info.weight_bytes < two.info.weight_bytes < 1.6 * one.info.weight_bytes
    assert two.info.fingerprint == one.info.fingerprint
    two.close()


def test_blocks_settled_for_a_group_leave_memory_for_all_ranks(folder):
    one = check_config(WorkerConfig(model=str(folder), device="cpu", max_num_seqs=4096))
    two = check_config(
        WorkerConfig(model=str(folder), device="cpu", max_num_seqs=4096, tensor_parallel_size=3)
    )
    assert one.num_blocks is not None
    assert two.num_blocks is not None
    # A rank has one KV head of three, a third of the memory, and a third of what a block takes.
    assert two.num_blocks <= one.num_blocks * 1.02


def step(number: int, rows: list[Row], admitted: list[NewSequence] | None = None) -> StepPlan:
    decodes = sum(1 for row in rows if row.count == 1)
    tokens = sum(row.count for row in rows)
    return StepPlan(number, rows, admitted or [], [], decodes, tokens)


def start_decoding(executor: Any) -> Callable[[], None]:
    """Admit one sequence; each call decodes one token of it."""
    sampling = SamplingParams(max_tokens=10_000, temperature=0.0)
    new = NewSequence(1, [5, 6, 7, 8], 4, sampling)
    executor.submit(step(1, [Row(1, 0, 4, True, list(range(1, 30)))], [new])).wait()
    state = {"step": 1, "computed": 4}

    def decode() -> None:
        state["step"] += 1
        executor.submit(step(state["step"], [Row(1, state["computed"], 1, True, [])])).wait()
        state["computed"] += 1

    return decode


def outlive(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that still run then. One that has ended but that nobody has asked about counts as
    ended: where an orphan's new parent does not care, it stays a zombie."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + within_s
    while (left := [p for p in processes if runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def keep_decoding(decode: Callable[[], None]) -> None:
    """At full speed at first; then for two seconds more, should the signal take its time."""
    for _ in range(200):
        decode()
    for _ in range(200):
        time.sleep(0.01)
        decode()


class Group:
    """A group whose processes are known."""

    def __init__(self, worker: WorkerConfig) -> None:
        self.processes: list[RankProcess] = []
        self.executor = make_executor(worker, launch=self._launch)

    def _launch(self, path: str, rank: int) -> RankProcess:
        self.processes.append(launch_process(path, rank))
        return self.processes[-1]


@pytest.mark.parametrize(
    ("collectives", "number", "busy"),
    [
        ("shm", signal.SIGKILL, True),
        ("shm", signal.SIGKILL, False),
        ("shm", signal.SIGSTOP, True),
        ("shm", signal.SIGSTOP, False),
        ("gloo", signal.SIGKILL, True),
        ("gloo", signal.SIGSTOP, True),
    ],
)
def test_a_lost_rank_is_noticed_in_time_and_takes_the_others_with_it(
    folder, collectives, number, busy
):
    group = Group(config(folder, 3, collectives))
    decode = start_decoding(group.executor)
    victim, other = (psutil.Process(p.pid) for p in group.processes)
    try:
        os.kill(victim.pid, number)
        began = time.monotonic()
        if busy:
            with pytest.raises(GroupBroken):
                keep_decoding(decode)
        else:
            while group.executor.problem() is None and time.monotonic() - began < 2 * NOTICED_S:
                time.sleep(0.01)
        assert time.monotonic() - began < NOTICED_S + 0.5
        if not busy:
            assert "rank 1" in (group.executor.problem() or "")
            with pytest.raises(GroupBroken, match="rank 1"):
                decode()
    finally:
        group.executor.close()
    assert not outlive([victim, other], 5), "a rank outlived its group"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_within_a_compiled_call_is_noticed_in_time(whole_tiles, number):
    group = Group(config(whole_tiles, 3, "shm"))
    try:
        if not runs_compiled(group.executor):
            pytest.skip("no kernels here")
        decode = start_decoding(group.executor)
        victim, other = (psutil.Process(p.pid) for p in group.processes)
        os.kill(victim.pid, number)
        began = time.monotonic()
        with pytest.raises(GroupBroken):
            keep_decoding(decode)
        assert time.monotonic() - began < NOTICED_S + 0.5
        assert outlive([victim, other], 2.0) == []
    finally:
        group.executor.close()


def test_ranks_end_when_their_engine_is_killed(folder, tmp_path):
    """Nobody is left to tell them: the connection's end is what they go by (R43)."""
    program = textwrap.dedent(
        f"""
        import sys, time
        sys.path[:0] = {sys.path!r}
        from tests.determinism.test_tensor_parallel import Group, config, start_decoding
        from pathlib import Path
        group = Group(config(Path({str(folder)!r}), 3))
        decode = start_decoding(group.executor)
        print(*(process.pid for process in group.processes), flush=True)
        for _ in range(400):
            decode()
            time.sleep(0.05)
        """
    )
    script = tmp_path / "engine.py"
    script.write_text(program)
    engine = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
    assert len(ranks) == 2
    engine.kill()
    engine.wait()
    assert not outlive(ranks, 5), "a rank outlived its engine"
    engine.stdout.close()


def test_closing_ends_the_ranks_and_is_idempotent(folder):
    group = Group(config(folder, 2))
    ranks = [psutil.Process(p.pid) for p in group.processes]
    group.executor.close()
    group.executor.close()
    assert not outlive(ranks, 5)
    with pytest.raises(RuntimeError, match="closed"):
        group.executor.submit(step(1, []))


def test_a_malformed_plan_is_the_end_of_the_group(folder):
    group = Group(config(folder, 2))
    try:
        with pytest.raises(RuntimeError, match="never admitted"):
            group.executor.submit(step(1, [Row(9, 0, 1, True, [1])])).wait()
    finally:
        group.executor.close()


def test_a_rank_that_never_comes_is_a_clear_error(folder, monkeypatch):
    monkeypatch.setattr(crew, "ARRIVAL_S", 0.3)

    class Nobody:
        def kill(self) -> None: ...

    with pytest.raises(ConfigError, match=r"ranks \[1, 2\] did not come up .*resources"):
        GroupExecutor(config(folder, 3), lambda path, rank: Nobody())


def test_a_rank_that_cannot_load_says_why(folder, tmp_path):
    """The leader's own check passes; the model is gone when the rank looks at it."""
    moved = write_model(tmp_path / "model", TinyLlama(vocab=VOCAB))

    def launch(path: str, rank: int) -> RankProcess:
        (moved / "model.safetensors").rename(tmp_path / "elsewhere")
        return launch_process(path, rank)

    with pytest.raises((ConfigError, ModelError), match=r"model\.safetensors"):
        make_executor(config(moved, 2), launch=launch)


@pytest.mark.parametrize(
    ("collectives", "says"),
    [
        ("pigeon", r"collectives must be one of .*'shm'.*'pigeon'"),
        ("nccl", r"collectives 'nccl' needs device 'cuda', got 'cpu'"),
    ],
)
def test_carriers_that_cannot_be_are_refused_before_anything_starts(folder, collectives, says):
    with pytest.raises(ConfigError, match=says):
        check_config(config(folder, 2, collectives))


def test_absurd_sizes_are_refused_with_the_limit(folder):
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at most 64, got 65"):
        config(folder, 65)
