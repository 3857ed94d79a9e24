"""`headway drain` and its call, against a gateway."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from cluster.commands import drain
from cluster.core.outcome import DrainOrder
from cluster.text.tokenizer import Tokenizer
from headway.client import Client
from headway.errors import ClientError, InvalidRequest
from tests.wire.live import live_gateway
from tests.wire.wire_support import Script, Wire

FINISH, MOVE, UNDO = DrainOrder.FINISH, DrainOrder.MOVE, DrainOrder.UNDO


@pytest.fixture
def running(tokenizer: Tokenizer) -> Iterator[Wire]:
    with live_gateway(tokenizer, Script([35])) as wire:
        yield wire


def headway_drain(*arguments: str) -> int:
    parser = argparse.ArgumentParser("headway")
    drain.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["drain", *arguments])
    code: int = args.run(args)
    return code


def test_the_call_carries_every_order(running):
    with Client(running.address) as client:
        assert client.drain("engine-a") == 5
        assert client.drain("engine-a", move=True) == 0
        client.drain("engine-a", undo=True)
        with pytest.raises(InvalidRequest, match="does not go together with undo"):
            client.drain("engine-a", undo=True, move=True)
        with pytest.raises(ClientError, match="no engine 'nobody' here; there are: engine-a"):
            client.drain("nobody")
    orders = [("engine-a", FINISH), ("engine-a", MOVE), ("engine-a", UNDO), ("nobody", FINISH)]
    assert running.source.drained == orders


def test_what_is_left_after_the_grace_period_moves(running, capsys):
    assert headway_drain("engine-a", "--address", running.address, "--grace", "1") == 0
    said = capsys.readouterr().out
    assert "engine-a still has 5 sequences: they go on elsewhere\nengine-a is drained" in said
    orders = [order for _, order in running.source.drained]
    assert orders.count(FINISH) >= 2, "it was not given the time"
    assert orders[-1] is MOVE


def test_an_engine_that_keeps_its_sequences_is_an_error(running, capsys, monkeypatch):
    monkeypatch.setattr(drain, "MOVE_S", 1.0)
    assert headway_drain("engine-b", "--address", running.address, "--grace", "0") == 1
    assert capsys.readouterr().out.endswith("engine-b still has 5 sequences\n")


@pytest.mark.parametrize("grace", ["nan", "inf", "-1", "1e9"])
def test_an_impossible_grace_period_is_refused(running, capsys, grace):
    assert headway_drain("engine-a", "--address", running.address, f"--grace={grace}") == 2
    assert "--grace must be 0 to 604800 s" in capsys.readouterr().err
    assert running.source.drained == []
