from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.errors import ConfigError, Overloaded
from cluster.gateway.config import GatewayConfig, Limits
from cluster.gateway.interceptors import ApiKeys, InFlight


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("  # team a\n\none-key\n  other-key  \n", "utf-8")
    keys = ApiKeys.from_file(path)
    assert keys.admits("one-key")
    assert keys.admits("other-key")
    assert not any(keys.admits(key) for key in ("", "one", "one-key ", "# team a", "ONE-KEY", "é"))


@pytest.mark.parametrize("content", ["", "# only a comment\n", "two words\n", "schlüssel\n"])
def test_bad_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match="keys"):
        ApiKeys.from_file(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        ApiKeys.from_file(tmp_path / "nowhere")


def test_places_come_back() -> None:
    in_flight = InFlight(limit=2, retry_after_s=1.5)
    in_flight.enter()
    in_flight.enter()
    with pytest.raises(Overloaded) as caught:
        in_flight.enter()
    assert caught.value.retry_after_s == 1.5
    in_flight.leave()
    in_flight.enter()
    assert in_flight.active == 2


@pytest.mark.parametrize("address", ["", "50051", "host", "host:", "host:x", "host:70000", "h:-1"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        GatewayConfig(address=address)


def test_an_address_without_host_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"name a host \(0\.0\.0\.0 for all.*got ':50051'"):
        GatewayConfig(address=":50051")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::]:50051", "localhost:65535"])
def test_good_addresses(address: str) -> None:
    assert GatewayConfig(address=address).address == address


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_message_bytes", 0),
        ("max_in_flight", 0),
        ("tokenizer_threads", 0),
        ("tokenizer_queue", -1),
        ("retry_after_s", 0.0),
        ("retry_after_s", float("nan")),
    ],
)
def test_impossible_limits(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        Limits(**{field: value})
