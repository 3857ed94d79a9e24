"""The GPU benchmark where there is no GPU: its arithmetic, and a run with tiny shapes."""

from __future__ import annotations

import json

import pytest
import torch

from workers.bench_gpu import __main__ as command
from workers.bench_gpu.kernels import Batch, attention_inputs
from workers.bench_gpu.measures import (
    Measurement,
    attention_operations,
    causal_pairs,
    gigabytes_per_second,
    percentile,
    teraflops,
    time_rounds,
)
from workers.bench_gpu.randommodel import ModelShape
from workers.bench_gpu.report import table
from workers.bench_gpu.suites import card_suite, dry_suite


@pytest.mark.parametrize(("count", "context"), [(1, 0), (1, 7), (5, 0), (4, 9)])
def test_causal_pairs_are_counted_one_by_one(count, context):
    assert causal_pairs(count, context) == sum(context + i + 1 for i in range(count))


def test_rates_are_of_the_median_round():
    assert gigabytes_per_second(3_000_000_000, [1.0, 2.0, 9.0]) == 1.5
    assert teraflops(8 * 10**12, [4.0, 1.0, 2.0]) == 4.0
    assert attention_operations(num_heads=2, head_dim=8, pairs=3) == 4 * 2 * 8 * 3


@pytest.mark.parametrize(("share", "value"), [(0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4), (0.0, 1)])
def test_percentile_is_a_value_that_occurred(share, value):
    assert percentile([4, 1, 3, 2], share) == value


def test_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_warmup_rounds_are_not_counted():
    calls = []
    assert len(time_rounds(lambda: calls.append(1), torch.device("cpu"), 4)) == 4
    assert len(calls) > 4


def test_share_of_the_card():
    assert Measurement("a", "b", 2.0, "GB/s", 8.0).share == 0.25
    assert Measurement("a", "b", 2.0, "GB/s").share == 0.0


def test_table_names_a_group_once():
    lines = table([Measurement("g", "x", 1.0, "ms"), Measurement("g", "y", 2.0, "ms", 4.0)])
    assert lines.count("g\n") == 1
    assert lines.endswith("0.50 of 4")


def test_the_model_is_an_8b():
    assert 8.0e9 < ModelShape().parameters < 8.1e9


def test_the_scenarios_fit_a_card_of_40_gib():
    suite = card_suite(32)
    config = suite.config("folder", {})
    shape = suite.model
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    cache = config.num_blocks * config.block_size * token
    assert cache + 2 * shape.parameters < 36 * 2**30


@pytest.mark.parametrize("batch", [Batch(3, 1, 40), Batch(2, 5, 17)], ids=str)
def test_inputs_are_a_step(batch):
    spec = dry_suite().kernels.spec
    query, cache, meta = attention_inputs(spec, batch)
    assert len(query) == meta.num_tokens == batch.sequences * batch.count
    assert meta.cu_seqlens_q.tolist() == list(range(0, meta.num_tokens + 1, batch.count))
    pages = meta.block_table.flatten().tolist()
    assert len(set(pages)) == len(pages)
    assert min(pages) == 1
    assert max(pages) < len(cache.keys)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "no usable GPU" in capsys.readouterr().out


def test_without_room_for_the_model_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(ModelShape, "parameters", 10**18)
    assert command.main(["--dry-run", "--scratch", str(tmp_path)]) == 1
    assert "--scratch" in capsys.readouterr().out


def test_dry_run_measures_everything(capsys, tmp_path):
    report = tmp_path / "report.json"
    assert command.main(["--dry-run", "--scratch", str(tmp_path), "--json", str(report)]) == 0
    assert "TTFT of a prompt" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [report]
    written = json.loads(report.read_text())
    assert {"device", "versions", "date", "results"} <= set(written)
    assert written["versions"]["torch"]
    groups = [result["group"] for result in written["results"]]
    for wanted in ("card", "decode attention", "prefill attention", "decode step", "2 running"):
        assert any(group.startswith(wanted) for group in groups), wanted
    assert all(result["value"] > 0 for result in written["results"])
