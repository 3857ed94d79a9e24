"""Cores of workers: lists, claims that nobody shares, and what is bound in the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster.core.errors import ConfigError
from workers import cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no affinity on this system"
)


@pytest.fixture(autouse=True)
def nothing_claimed():
    before = os.sched_getaffinity(0)
    yield
    cores.release()
    cores.bind(before)


def test_lists():
    assert cores.parse_cores("3") == {3}
    assert cores.parse_cores("2-5, 7") == {2, 3, 4, 5, 7}
    for wrong in ("", "a", "1-", "-1", "1,,2"):
        with pytest.raises(ConfigError, match="cores must be"):
            cores.parse_cores(wrong)


def test_one_logical_core_of_each_physical_one():
    siblings = {0: 0, 1: 1, 4: 0, 5: 1}
    assert cores.physical_cores([5, 4, 1, 0], siblings) == [0, 1]
    assert cores.physical_cores([4, 5], siblings) == [4, 5]


def test_claims_are_apart_and_leave_the_first_core(tmp_path, caplog):
    assert cores.claim([0, 1, 2, 3], 2, tmp_path) == {1, 2}
    assert cores.claim([0, 1, 2, 3], 2, tmp_path) == set()
    assert "2 thread(s) want one each, 1 of 3 are free" in caplog.text
    # The failed claim has given back what it had.
    assert cores.claim([0, 1, 2, 3], 1, tmp_path) == {3}


def test_a_claim_ends_with_its_process(tmp_path):
    script = (
        "import sys; from pathlib import Path; from workers import cores\n"
        "print(cores.claim([0, 1], 1, Path(sys.argv[1])), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline().strip() == "{1}"
        assert cores.claim([0, 1], 1, tmp_path) == set()
        other.kill()
        other.wait()
    assert cores.claim([0, 1], 1, tmp_path) == {1}


def test_a_list_binds_every_thread():
    core = min(os.sched_getaffinity(0))
    cores.settle_on_cores(str(core), threads=1)
    for thread in os.listdir("/proc/self/task"):
        assert os.sched_getaffinity(int(thread)) == {core}


def test_auto_binds_to_what_it_claims(tmp_path, monkeypatch):
    allowed = sorted(os.sched_getaffinity(0))
    if len(cores.physical_cores(allowed)) < 2:
        pytest.skip("one core only")
    monkeypatch.setattr(cores, "lock_folder", lambda: tmp_path)
    cores.settle_on_cores("auto", threads=1)
    assert os.sched_getaffinity(0) == {cores.physical_cores(allowed)[1]}
    # Once per process: a second shard in it stays where it is.
    cores.settle_on_cores("auto", threads=1)
    assert len(os.sched_getaffinity(0)) == 1


def test_nothing_is_bound_without_being_asked():
    before = os.sched_getaffinity(0)
    cores.settle_on_cores("", threads=1)
    assert os.sched_getaffinity(0) == before


def test_lists_that_cannot_be():
    with pytest.raises(ConfigError, match=r"cores must be among .*, got 4000"):
        cores.settle_on_cores("4000", threads=1)
    with pytest.raises(ConfigError, match="at least as many as threads 64, got 1"):
        cores.settle_on_cores(str(min(os.sched_getaffinity(0))), threads=64)


def test_impossible_cores_are_refused_before_anything_is_loaded(tmp_path):
    from cluster.core.config import WorkerConfig
    from workers.executors import check_config

    for wanted, says in (
        ("4095", r"cores must be among \[.*\], got 4095"),
        ("0-99999999999", "up to 4095"),
        ("two", "list like '2-5,7'"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_config(WorkerConfig(model=str(tmp_path), device="cpu", cores=wanted))
