"""The benchmark of the metrics' cost measures both kinds; its figures are for a quiet machine."""

from __future__ import annotations

from pathlib import Path

from cluster.bench import metrics
from cluster.bench.metrics import Cost, EngineBench, RouterBench, cost_of
from cluster.text.tokenizer import Tokenizer
from tests.unit.text.text_folders import byte_level_folder


def test_router(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(metrics, "STREAMS", 3)
    monkeypatch.setattr(metrics, "OUTPUT", 20)
    bench = RouterBench(Tokenizer.from_folder(byte_level_folder(tmp_path)))
    cost = cost_of(bench, rounds=2)
    assert cost.without_us > 5
    assert cost.with_us > 5
    # The side that is measured counted its streams: warm-up and two rounds.
    assert bench._board.metrics.ttft.count >= 9
    # By itself it is a matter of microseconds, on whatever machine.
    assert 0 < cost.added_us < 30


def test_engine(monkeypatch):
    monkeypatch.setattr(metrics, "OUTPUT", 20)
    cost = cost_of(EngineBench(4), rounds=2)
    assert cost.without_us > 5
    assert 0 < cost.added_us < 30


def test_verdict():
    assert Cost("", 100.0, 101.0, -0.01, 0.03, 0.0, 1.9).holds
    assert not Cost("", 100.0, 101.0, -0.01, 0.03, 0.0, 2.1).holds
    assert not Cost("", 100.0, 105.0, 0.03, 0.06, 0.0, 0.5).holds
    assert Cost("", 100.0, 105.0, 0.03, 0.06, 0.02, 0.5).holds
