"""`headway loadtest beside`: servers of both protocols under one schedule, in turns."""

from __future__ import annotations

import json

import pytest

from cluster.core.errors import ConfigError
from loadtests.beside import parse_rival
from loadtests.targets.base import TargetSpec
from tests.load.mock import mock_server
from tests.load.openai_server import openai_server
from tests.load.test_commands import FAST, LOOSE, headway


def test_servers_take_turns_under_the_same_schedules(tmp_path, capsys):
    with openai_server() as url, mock_server(tmp_path, "--gap-ms", "12") as mock:
        servers = [f"peer={url}#any", f"ours={mock.address}"]
        options = ["--rounds", "2", "--out", str(tmp_path / "out"), *FAST, *LOOSE]
        assert headway("beside", *servers, *options) == 0
    said = capsys.readouterr().out.splitlines()
    turns = [line for line in said if ", seed " in line]
    there = url.removesuffix("/v1")
    assert [line.removeprefix(there).split(", ")[1] for line in turns] == 2 * ["seed 0"] + 2 * [
        "seed 1"
    ]
    assert [there in line for line in turns] == [True, False, False, True]
    median_of = {line.split()[0] + line.split()[1]: line.split() for line in said if " P50" in line}
    # A mock with 12 ms between tokens beside a server with some more than 4 ms.
    assert 1.5 < float(median_of["TPOTP50"][4]) < 3.2
    assert any(line.startswith("peer: 58 requests measured, 2 failed") for line in said)
    assert any(line.startswith("ours: 60 requests measured, 0 failed") for line in said)
    plans = [
        json.loads((tmp_path / "out" / name / "1/summary.json").read_text())["scenario"]
        for name in ("peer", "ours")
    ]
    assert plans[0] == plans[1]


def test_a_server_is_named_with_its_protocol():
    like = TargetSpec(timeout_s=7)
    assert parse_rival("a=10.0.0.1:9", like).target == TargetSpec(
        "headway", "10.0.0.1:9", timeout_s=7
    )
    peer = parse_rival("b=http://h:1/v1#m/x", like).target
    assert (peer.kind, peer.address, peer.model) == ("openai", "http://h:1/v1", "m/x")
    assert parse_rival("b=http://h:1", TargetSpec(model="m")).target.model == "m"


@pytest.mark.parametrize(
    "text", ["10.0.0.1:9", "=10.0.0.1:9", "a=", "../a=10.0.0.1:9", "b=http://h:1"]
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
    ],
)
def test_what_makes_no_comparison_is_refused_before_the_load(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        headway("beside", *arguments)
