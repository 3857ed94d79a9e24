"""The benchmark command on small work: what it compares, and what it writes."""

from __future__ import annotations

import json

import pytest
import torch

from tests.determinism.tiny_models import TinyLlama, write_model
from workers.bench_cpu.__main__ import Suite, main
from workers.bench_cpu.attention import AttentionCase
from workers.bench_cpu.steps import StepCase
from workers.bench_cpu.turns import compare
from workers.native.build import find_compiler

SMALL = Suite(
    (AttentionCase(4, 2, 16, 3, 1, 20), AttentionCase(4, 2, 16, 1, 8, 16)),
    StepCase(batch=2, context=20, prompt=40, budget=16, requests=4),
)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no compiler here")


@pytest.fixture
def run(tmp_path):
    """The command's results as written to its JSON file. Leaves torch's threads as they were."""
    threads = torch.get_num_threads()
    target = tmp_path / "results.json"

    def command(*arguments: str) -> list[dict[str, object]]:
        main(["--rounds", "2", "--json", str(target), *arguments], SMALL)
        return json.loads(target.read_text())

    yield command
    torch.set_num_threads(threads)


def test_ratios_by_hand():
    times = {"a": [10.0, 30.0, 20.0], "b": [20.0, 20.0, 20.0]}
    result = compare("case", "float32", times, ("a", "b"), 2.0)
    assert (result.best, result.ratio, result.median_ratio) == ((10.0, 20.0), 0.5, 1.0)


def test_every_case_and_the_steps_are_measured(run, tmp_path, capsys):
    model = write_model(tmp_path / "tiny", TinyLlama(vocab=1024, max_len=64))
    results = run("--model", str(model))
    attention, steps, collectives = 2 + 1, 6 + 1 + 1, 2
    assert len(results) == 2 * (attention + steps + collectives)
    assert all(r["ratio"] > 0 and r["median_ratio"] > 0 for r in results)
    assert {r["dtype"] for r in results} == {"bfloat16", "float32"}
    out = capsys.readouterr().out
    for said in (
        "decode step of tiny, 2 x 20",
        "target <= 0.75",
        "longest gap beside a prompt of 40",
        "host work, 2 sequences",
        "resident memory, 4 requests later",
        "all-reduce of [16, 512]",
    ):
        assert said in out


def test_without_a_model_the_steps_are_left_out_and_said_so(run, tmp_path, capsys):
    results = run("--model", str(tmp_path / "none"), "--dtype", "float32")
    assert len(results) == 5
    assert "headway pull" in capsys.readouterr().out
