"""How a client reaches a server, and what it takes for the server's silence."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a server.

    api_key: sent with every call; never send one without TLS over a network that others share.
    ca_file: PEM with the certificate that signed the server's; turns TLS on. tls_name: the name in
    the server's certificate when it is not the host of the address.
    """

    address: str = DEFAULT_ADDRESS
    api_key: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    tls_name: str | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None means plain text."""
        if self.ca_file is None:
            return None
        return grpc.ssl_channel_credentials(self.ca_file.read_bytes())

    def options(self) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [
            # Answers are as long as they are; the server limits requests.
            ("grpc.max_receive_message_length", -1),
            # gRPC would share one connection between all clients of a process that go to the same
            # address. Where routers share it, all of them would be served by one, and die with it.
            ("grpc.use_local_subchannel_pool", 1),
            # A server that vanished without a word (power, cable) is noticed within 8 s, also
            # before the first token: a resumable stream then goes on elsewhere. Not sooner: a ping
            # may wait behind a prompt that is being sent over a slow line.
            ("grpc.keepalive_time_ms", 3_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            # This one decides when an unanswered ping ends the connection; its default is a minute.
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.http2.max_pings_without_data", 0),
            # Try again soon after a restart; the default waits up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 200),
            # A router that hangs takes the connection and says nothing: the next one is tried. Not
            # sooner: a process that is busy with other streams may take two seconds to connect.
            ("grpc.min_reconnect_backoff_ms", 3_000),
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        if self.tls_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls_name))
        return options

    def channel(self) -> grpc.Channel:
        credentials, options = self.credentials(), self.options()
        if credentials is None:
            return grpc.insecure_channel(self.address, options)
        return grpc.secure_channel(self.address, credentials, options)

    def aio_channel(self) -> grpc.aio.Channel:
        """The same for the event loop that it is called in."""
        credentials, options = self.credentials(), self.options()
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, credentials, options)
