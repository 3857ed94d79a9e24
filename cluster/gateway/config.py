"""What an operator decides about the front door."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cluster.core.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process takes on at most; beyond it callers are told when to come back.

    max_message_bytes: one request message; larger ones are RESOURCE_EXHAUSTED by the transport.
    max_metadata_bytes: all headers of a call together; the same.
    max_in_flight: Generate and Complete calls in progress.
    tokenizer_threads, tokenizer_queue: threads that tokenise, and prompts that may wait for one.
    retry_after_s: how long a refused caller should wait.
    """

    max_message_bytes: int = 4 << 20
    max_metadata_bytes: int = 8 << 10
    max_in_flight: int = 1024
    tokenizer_threads: int = 2
    tokenizer_queue: int = 256
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_message_bytes", "max_metadata_bytes", "max_in_flight"):
            _at_least(name, getattr(self, name), 1)
        _at_least("tokenizer_threads", self.tokenizer_threads, 1)
        _at_least("tokenizer_queue", self.tokenizer_queue, 0)
        if not 0.0 < self.retry_after_s <= 3600.0:
            raise ConfigError(f"retry_after_s must be in (0, 3600], got {self.retry_after_s!r}")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the server's certificate chain and its private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Where and how the server listens.

    address: host:port; port 0 takes a free one. reuse_port: several router processes of one
    node share the port (SO_REUSEPORT); without it a taken port is an error. api_keys_file: one key
    per line, '#' begins a comment; None admits everybody. tls: None serves plain text.
    """

    address: str = DEFAULT_ADDRESS
    reuse_port: bool = False
    tls: TlsFiles | None = None
    api_keys_file: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not (port.isdecimal() and int(port) < 1 << 16 and self.address != port):
            raise ConfigError(f"address must be host:port, got {self.address!r}")
        if not host:
            raise ConfigError(
                f"address must name a host (0.0.0.0 for all interfaces), got {self.address!r}"
            )


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
