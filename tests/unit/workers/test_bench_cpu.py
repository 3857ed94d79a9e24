"""The benchmark command on small work: what it compares, and what it writes."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.determinism.tiny_models import TinyLlama, write_model
from workers import bench_cpu
from workers.bench_cpu import AttentionCase, compare
from workers.native.build import find_compiler

SMALL = (AttentionCase(4, 2, 16, 3, 1, 20), AttentionCase(4, 2, 16, 1, 8, 16))

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no compiler here")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command's results as written to its JSON file. Leaves torch's threads as they were."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench_cpu, "CASES", SMALL)
    monkeypatch.setattr(bench_cpu, "STEP_BATCH", 2)
    monkeypatch.setattr(bench_cpu, "STEP_CONTEXT", 20)
    target = tmp_path / "results.json"

    def main(*arguments: str) -> list[dict[str, object]]:
        command = ["bench_cpu", "--rounds", "2", "--json", str(target), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        bench_cpu.main()
        return json.loads(target.read_text())

    yield main
    torch.set_num_threads(threads)


def test_ratios_by_hand():
    times = {"a": [10.0, 30.0, 20.0], "b": [20.0, 20.0, 20.0]}
    result = compare("case", "float32", times, ("a", "b"), 2.0)
    assert (result.fastest_us, result.ratio, result.median_ratio) == ((10.0, 20.0), 0.5, 1.0)


def test_every_case_and_the_step_are_measured(run, tmp_path, capsys):
    model = write_model(tmp_path / "tiny", TinyLlama(vocab=1024, max_len=64))
    results = run("--model", str(model))
    assert len(results) == 2 * (2 + 1 + 2)
    assert all(r["ratio"] > 0 and r["median_ratio"] > 0 for r in results)
    assert {r["dtype"] for r in results} == {"bfloat16", "float32"}
    out = capsys.readouterr().out
    assert "decode step of tiny, 2 x 20" in out
    assert "target <= 0.75" in out


def test_without_a_model_the_step_is_left_out_and_said_so(run, tmp_path, capsys):
    results = run("--model", str(tmp_path / "none"), "--dtype", "float32")
    assert len(results) == 3
    assert "headway pull" in capsys.readouterr().out
