"""Puts the front door together: one grpc.aio server with its services, limits and credentials."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.core.errors import ConfigError
from cluster.gateway.admin import AdminServicer
from cluster.gateway.config import GatewayConfig, TlsFiles
from cluster.gateway.encoding import EncodePool
from cluster.gateway.health import HealthReporter
from cluster.gateway.interceptors import (
    ApiKeyInterceptor,
    ApiKeys,
    CallsInterceptor,
    DecodingInterceptor,
    InFlight,
    InFlightInterceptor,
)
from cluster.gateway.mapping import check_defaults
from cluster.gateway.servicer import InferenceServicer
from cluster.metrics.board import RouterBoard
from cluster.metrics.window import TICK_S
from cluster.router.stream import TokenSource
from cluster.text.tokenizer import Tokenizer
from headway.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
COUNTED_METHODS = tuple(f"/{INFERENCE}/{name}" for name in ("Generate", "Resume", "Complete"))


class GatewayServer:
    """A server that build_server() made: start it once, stop it once."""

    def __init__(
        self,
        server: grpc.aio.Server,
        reporter: HealthReporter,
        encoder: EncodePool,
        board: RouterBoard,
        port: int,
    ) -> None:
        self._server = server
        self.board = board
        self._ticking: asyncio.Task[None] | None = None
        self._health = reporter
        self._encoder = encoder
        self.port = port
        """The bound port, also when the configuration said 0."""

    async def start(self) -> int:
        """Begin to serve; returns the port."""
        await self._health.start()
        await self._server.start()
        self._ticking = asyncio.create_task(self._tick(), name="tails")
        return self.port

    async def stop(self, grace_s: float, notice_s: float = 0.0) -> None:
        """Health NOT_SERVING; after `notice_s`, in which load balancers may see that, no new
        calls; calls in progress get `grace_s` to finish and are then cancelled. Idempotent."""
        await self._health.stop()
        if notice_s > 0:
            await asyncio.sleep(notice_s)
        await self._server.stop(grace_s)
        self._encoder.close()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
            self._ticking = None

    async def _tick(self) -> None:
        while True:
            self.board.metrics.window.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._server.wait_for_termination()


def build_server(
    source: TokenSource,
    tokenizer: Tokenizer,
    config: GatewayConfig,
    board: RouterBoard | None = None,
) -> GatewayServer:
    """A bound server, not yet serving. To be called in a running event loop.

    board: where this router and what it measures are told of; None makes one for it alone. Raises
    ConfigError (port taken, unreadable TLS or key file), ModelError (default sampling).
    """
    limits = config.limits
    board = board or RouterBoard("router", source.facts)
    in_flight = InFlight(limits.max_in_flight, limits.retry_after_s)
    interceptors: list[grpc.aio.ServerInterceptor[Any, Any]] = [
        CallsInterceptor(board.meter, COUNTED_METHODS)
    ]
    if config.api_keys_file is not None:
        interceptors.append(ApiKeyInterceptor(ApiKeys.from_file(config.api_keys_file)))
    interceptors.append(InFlightInterceptor(in_flight, COUNTED_METHODS, board.meter))
    interceptors.append(DecodingInterceptor((INFERENCE, ADMIN)))
    server = grpc.aio.server(interceptors=interceptors, options=channel_options(config))

    encoder = EncodePool(tokenizer, limits)
    inference = InferenceServicer(source, tokenizer, encoder, limits, board.meter)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)  # type: ignore[no-untyped-call]
    admin = AdminServicer(source, tokenizer, in_flight, board)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
    reporter = HealthReporter(source, [INFERENCE])
    health_pb2_grpc.add_HealthServicer_to_server(reporter.servicer, server)
    names = (INFERENCE, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)

    return GatewayServer(server, reporter, encoder, board, _bind(server, config))


def check_gateway(config: GatewayConfig, tokenizer: Tokenizer) -> None:
    """What build_server() would refuse, without a server. Raises ConfigError, ModelError."""
    if config.api_keys_file is not None:
        ApiKeys.from_file(config.api_keys_file)
    if config.tls is not None:
        _credentials(config.tls)
    check_defaults(tokenizer.defaults, tokenizer.folder)


def channel_options(config: GatewayConfig) -> list[tuple[str, int]]:
    """Options of grpc's core that the defaults get wrong for long quiet streams."""
    limits = config.limits
    return [
        ("grpc.so_reuseport", int(config.reuse_port)),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Soft and hard limit equal: between them the core refuses at random.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # A client that pings while its request waits for the first token is no attacker. The
        # documented min_recv_ping_interval option does nothing; these two decide.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Finds clients that vanished without closing, so that their requests are freed.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
    ]


def _bind(server: grpc.aio.Server, config: GatewayConfig) -> int:
    try:
        if config.tls is None:
            port = server.add_insecure_port(config.address)
        else:
            port = server.add_secure_port(config.address, _credentials(config.tls))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {config.address}: the port is taken or the host is not local"
        ) from error
    if port == 0:
        raise ConfigError(f"cannot listen on {config.address}")
    return port


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    pair = (_read_pem(tls.key), _read_pem(tls.certificate))
    return grpc.ssl_server_credentials([pair])


def _read_pem(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file {path}: {error.strerror}") from error
    if b"-----BEGIN" not in data:
        raise ConfigError(f"TLS file {path}: is not PEM")
    return data
