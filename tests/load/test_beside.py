"""`headway loadtest beside`: servers of both protocols under one schedule, in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from loadtests import runner
from loadtests.beside import parse_rival
from loadtests.targets.base import TargetSpec
from tests.load.mock import mock_server
from tests.load.openai_server import openai_server
from tests.load.test_commands import FAST, LOOSE, headway


def test_servers_take_turns_under_the_same_schedules(tmp_path, capsys):
    with openai_server() as url, mock_server(tmp_path, "--gap-ms", "12") as mock:
        servers = [f"peer={url}#any", f"ours={mock.address}"]
        options = ["--rounds", "2", "--out", str(tmp_path / "out"), *FAST, *LOOSE]
        # Two requests to the peer fail, so that its first round misses the objectives.
        assert headway("beside", *servers, *options) == 3
    said = capsys.readouterr().out.splitlines()
    turns = [line for line in said if line.startswith("round ")]
    assert [line.partition(":")[0] for line in turns] == [
        "round 1 of 2, peer",
        "round 1 of 2, ours",
        "round 2 of 2, ours",
        "round 2 of 2, peer",
    ]
    rows = {line[:16].strip(): line[16:].split() for line in said if " P50" in line}
    # A mock with 12 ms between tokens beside a server with some more than 4 ms.
    assert 1.5 < float(rows["TPOT P50"][2]) < 3.2
    assert any(line.startswith("peer: 58 requests measured, 2 failed") for line in said)
    assert any(line.startswith("ours: 60 requests measured, 0 failed") for line in said)
    assert "  error HTTP_503: 1" in said
    plans = {
        (name, number): _scenario(tmp_path / "out" / name / number)
        for name in ("peer", "ours")
        for number in ("0", "1")
    }
    for number in ("0", "1"):
        assert plans["peer", number] == plans["ours", number]
    assert plans["peer", "0"] != plans["peer", "1"]


def _scenario(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())["scenario"]
    return found


def test_a_server_that_is_not_there_costs_its_own_turns_only(tmp_path, capsys):
    with mock_server(tmp_path, "--gap-ms", "4") as mock:
        servers = ["gone=127.0.0.1:1", f"ours={mock.address}", "peer=http://127.0.0.1:1#m"]
        options = ["--rounds", "1", "--out", str(tmp_path / "out"), *FAST, *LOOSE]
        assert headway("beside", *servers, *options) == 4
    said = capsys.readouterr().out
    assert "gone: nothing was measured" in said
    assert "Connection refused" in said
    assert "error ClientConnectorError: 30" in said
    assert "ours: 30 requests measured, 0 failed" in said


def test_what_was_measured_before_an_interruption_is_shown(tmp_path, capsys, monkeypatch):
    sent = runner.run_load
    calls = []

    def once(job):
        calls.append(job)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return sent(job)

    monkeypatch.setattr(runner, "run_load", once)
    with mock_server(tmp_path, "--gap-ms", "4") as mock:
        servers = [f"a={mock.address}", f"b={mock.address}"]
        options = ["--rounds", "5", "--out", str(tmp_path / "out"), *FAST, *LOOSE]
        assert headway("beside", *servers, *options) == 130
    said = capsys.readouterr().out
    assert "interrupted" in said
    assert "b: 30 requests measured" in said
    assert "TPOT P50" in said


def test_a_server_is_named_with_its_protocol():
    like = TargetSpec(timeout_s=7)
    assert parse_rival("a=10.0.0.1:9", like).target == TargetSpec(
        "headway", "10.0.0.1:9", timeout_s=7
    )
    peer = parse_rival("b=http://h:1/v1#m/x", like).target
    assert (peer.kind, peer.address, peer.model) == ("openai", "http://h:1/v1", "m/x")
    assert parse_rival("b=http://h:1", TargetSpec(model="m")).target.model == "m"


@pytest.mark.parametrize(
    "text", ["10.0.0.1:9", "=10.0.0.1:9", "a=", "../a=10.0.0.1:9", "..=10.0.0.1:9", "b=http://h:1"]
)
def test_a_text_that_names_no_server_is_refused(text):
    with pytest.raises(ConfigError, match="names no"):
        parse_rival(text, TargetSpec())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a=127.0.0.1:1"], "two servers"),
        (["a=127.0.0.1:1", "a=127.0.0.1:2"], "name of its own"),
        (["a=127.0.0.1:1", "b=127.0.0.1:2", "--rounds", "0"], "--rounds must be at least 1"),
        (["a=127.0.0.1:1", "b=127.0.0.1:2", "--slo", "nix"], "no objectives"),
        (["a=127.0.0.1:1", "b=127.0.0.1:2", "--out", "/dev/null/x"], "no results can be written"),
    ],
)
def test_what_makes_no_comparison_is_refused_before_the_load(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        headway("beside", *arguments)


def test_no_load_is_sent_whose_results_could_not_be_kept():
    with pytest.raises(ConfigError, match="no results can be written"):
        headway("run", "--address", "127.0.0.1:1", "--out", "/dev/null/x")
