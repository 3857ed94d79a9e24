"""A recorded engine is planned the same again; a log that was changed is not."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from cluster.core.errors import ConfigError
from cluster.core.policies import PolicyChoice
from cluster.core.preemption import SwapCosts
from cluster.engine.steplog import Completed, Difference, read_log, replay
from tests.hop.support import (
    Engine,
    PacedExecutor,
    PacedLagging,
    expected,
    fleet,
    read_all,
    request,
)

CHOICES = {
    "chunked": PolicyChoice(),
    "everything": PolicyChoice(
        "chunked",
        queue="fair",
        reservation="estimated-peak",
        victims="cheapest-recompute",
        preemption="swap",
        prefix_cache="on",
        budget="itl",
        host_blocks=16,
        swap_costs=SwapCosts(1.0, 1e9),
    ),
    "dynamic": PolicyChoice("dynamic", max_queue_delay_s=0.01),
}


def record(folder: Path, choice: PolicyChoice, executor=PacedExecutor) -> Path:
    """A busy second with preemptions, cancels and a pause, on a real engine."""

    async def scenario() -> None:
        engine = Engine(
            "a",
            num_blocks=30,
            policies=choice,
            step_log_folder=str(folder),
            executor_type=executor,
        )
        async with fleet(engine) as dispatcher:
            requests = [request(n, max_tokens=10 + n) for n in range(24)]
            streams = [await dispatcher.open(r) for r in requests]
            for stream in streams[::5]:
                stream.leave()
            kept = [(s, r) for i, (s, r) in enumerate(zip(streams, requests, strict=True)) if i % 5]
            outputs = await asyncio.gather(*(read_all(s) for s, _ in kept))
            assert outputs == [expected(r) for _, r in kept]

    asyncio.run(scenario())
    (log,) = folder.glob("*.steplog")
    return log


@pytest.mark.parametrize("executor", [PacedExecutor, PacedLagging], ids=["serial", "overlapped"])
@pytest.mark.parametrize("name", CHOICES)
def test_a_recorded_engine_is_planned_the_same_again(name, executor, tmp_path):
    log = record(tmp_path, CHOICES[name], executor)
    done = replay(log)
    assert done.steps > 20
    assert done.tokens > 200
    command = [sys.executable, "-m", "cluster", "replay", str(log)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert f"{done.steps} steps" in told.stdout


def test_another_decision_is_found(tmp_path):
    log = record(tmp_path, PolicyChoice())
    changed = _rewrite(log, lambda r: [*r[:3], _other_policies(r[3])] if r[0] == "log" else r)
    with pytest.raises(Difference, match=r"step \d+ had \d+ tokens; the replay's step"):
        replay(changed)


def test_a_log_cut_off_by_a_kill_replays_as_far_as_it_goes(tmp_path):
    log = record(tmp_path, PolicyChoice())
    whole = replay(log).steps
    cut = tmp_path / "cut.steplog"
    cut.write_bytes(log.read_bytes()[: log.stat().st_size * 2 // 3])
    assert 0 < replay(cut).steps < whole


@pytest.mark.parametrize("junk", [b"", b"\xff" * 100, b"\x00\x00\x00\x03abc", b"hello"])
def test_what_is_no_step_log_is_refused(junk, tmp_path):
    path = tmp_path / "junk.steplog"
    path.write_bytes(junk)
    command = [sys.executable, "-m", "cluster", "replay", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 2
    assert str(path) in told.stderr
    assert "Traceback" not in told.stderr


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        replay(tmp_path / "nothing.steplog")


def test_records_are_plain_messagepack(tmp_path):
    """Anybody's MessagePack reader can open a log."""
    log = record(tmp_path, PolicyChoice())
    data, tags = log.read_bytes(), []
    while data:
        length = int.from_bytes(data[:4], "big")
        tags.append(msgpack.unpackb(data[4 : 4 + length], strict_map_key=False)[0])
        data = data[4 + length :]
    assert tags[0] == "log"
    assert {"submit", "command", "plan", "result"} <= set(tags)
    results = [r for r in read_log(log) if isinstance(r, Completed)]
    assert tags.count("result") == len(results)


def _other_policies(policies: dict) -> dict:
    return {**policies, **dataclasses.asdict(PolicyChoice("continuous")), "batching": "continuous"}


def _rewrite(log: Path, change) -> Path:
    data, out = log.read_bytes(), b""
    while data:
        length = int.from_bytes(data[:4], "big")
        record = msgpack.unpackb(data[4 : 4 + length], strict_map_key=False)
        body = msgpack.packb(change(record))
        out += len(body).to_bytes(4, "big") + body
        data = data[4 + length :]
    changed = log.with_name("changed.steplog")
    changed.write_bytes(out)
    return changed
