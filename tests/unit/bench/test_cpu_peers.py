"""Engines beside each other: the workload's figures, the turns, and the ratios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster.bench.cpu_peers import OURS, Contender, Work, compare, contenders, run_once
from cluster.bench.engine_alone import EngineAlone
from cluster.bench.peers import closed_loop
from cluster.core.errors import ConfigError
from tests.determinism.tiny_models import TinyLlama, write_model

WORK = Work(Path("model"), "float32", 64, 1)


def test_figures_by_hand(monkeypatch):
    monkeypatch.setattr(closed_loop, "REQUESTS", 2)
    monkeypatch.setattr(closed_loop, "OUTPUT", 2)
    found = closed_loop.figures({0: 1.0, 1: 2.0}, {0: [1.5, 1.75], 1: [2.5, 3.5]}, 4.0, 2.0)
    assert found == {
        "tokens_per_s": 1.0,
        "tokens_per_cpu_s": 2.0,
        "ttft_p50_ms": 500.0,
        "itl_p50_ms": 250.0,
        "itl_p99_ms": 1000.0,
    }


def test_lost_tokens_are_not_a_result(monkeypatch):
    monkeypatch.setattr(closed_loop, "REQUESTS", 1)
    with pytest.raises(RuntimeError, match="1 tokens came, not 64"):
        closed_loop.figures({0: 0.0}, {0: [1.0]}, 1.0, 1.0)


def test_no_more_than_so_many_at_a_time():
    live: list[int] = []
    most = 0

    def submit(number: int, prompt: list[int]) -> None:
        nonlocal most
        live.append(number)
        most = max(most, len(live))

    def step() -> list[tuple[int, int, bool]]:
        return [(live.pop(0), closed_loop.OUTPUT, True)]

    closed_loop.measure(submit, step)
    assert most == closed_loop.AT_A_TIME


def test_the_engine_alone_does_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(closed_loop, "REQUESTS", 3)
    model = write_model(tmp_path / "tiny", TinyLlama(vocab=30_000, max_len=2048))
    engine = EngineAlone(str(model), "float32", 64, 1)
    assert closed_loop.measure(engine.submit, engine.step)["tokens_per_s"] > 0


def test_who_takes_part():
    assert [c.name for c in contenders(WORK)] == [OURS, "headway over gRPC"]
    python = Path("/elsewhere/python")
    found = contenders(WORK, python, python, Path("exported"))
    assert [c.name for c in found[2:]] == ["vLLM", "OpenVINO GenAI"]
    assert found[2].command[2:] == ("model", "float32", "64", "1")
    assert found[3].command[2] == "exported"
    with pytest.raises(ConfigError, match="optimum-cli"):
        contenders(WORK, openvino_python=python)


def test_ratios_are_of_one_round():
    speeds = {OURS: iter([100.0, 10.0, 50.0]), "peer": iter([50.0, 5.0, 50.0])}
    turns: list[str] = []

    def run(contender: Contender) -> dict[str, float]:
        turns.append(contender.name)
        speed = next(speeds[contender.name])
        same = dict.fromkeys(("ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"), 7.0)
        return {"tokens_per_s": speed, **same}

    entered = [Contender(OURS, ()), Contender("peer", ())]
    ours, peer = compare(entered, 3, run)
    assert (ours.ratio, peer.ratio, peer.itl_ratio) == (1.0, 0.5, 1.0)
    assert peer.tokens_per_s == 50.0
    assert turns == [OURS, "peer", "peer", OURS, OURS, "peer"]


def test_a_peer_that_fails_says_why():
    with pytest.raises(ConfigError, match=r"peer does not run: .*no such thing"):
        run_once(Contender("peer", (sys.executable, "-c", "raise SystemExit('no such thing')")))
    with pytest.raises(ConfigError, match="peer: "):
        run_once(Contender("peer", ("/nowhere/python",)))
