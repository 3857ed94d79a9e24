"""`headway health`: a door that is open, one without an engine behind it, and none at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.gateway.config import GatewayConfig
from cluster.text.tokenizer import Tokenizer
from tests.wire.live import live_gateway
from tests.wire.wire_support import Script


def health(address: str) -> int:
    return main(["health", "--address", address, "--timeout", "3"])


def test_it_needs_no_key_and_follows_readiness(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("only-for-others\n")
    config = GatewayConfig("127.0.0.1:0", api_keys_file=keys)
    with live_gateway(tokenizer, Script([1]), config) as wire:
        assert health(wire.address) == 0
        assert capsys.readouterr().out == f"{wire.address}: SERVING\n"
        address = wire.address
    assert health(address) == 1
    assert capsys.readouterr().out == f"{address}: UNAVAILABLE\n"


def test_a_router_without_engines_is_not_ready(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_gateway(tokenizer, Script([1])) as wire:
        wire.source.is_ready = False
        deadline = time.monotonic() + 10
        while health(wire.address) == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert capsys.readouterr().out.endswith(f"{wire.address}: NOT_SERVING\n")
