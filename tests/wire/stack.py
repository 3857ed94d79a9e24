"""The whole way in one process: gateway, dispatcher, TCP hop and engines, measured and scraped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from cluster.gateway.config import GatewayConfig
from cluster.gateway.server import GatewayServer, build_server
from cluster.metrics.board import RouterBoard
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2, inference_pb2_grpc
from tests.hop.support import Engine, fleet
from tests.wire.wire_support import loopback

ROUTER_ID = "router-0"


@dataclass
class Stack:
    dispatcher: Dispatcher
    board: RouterBoard
    channel: grpc.aio.Channel
    address: str
    server: GatewayServer

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    def engines(self) -> list[tuple[str, str]]:
        return self.dispatcher.scraped()


@asynccontextmanager
async def stack(
    tokenizer: Tokenizer,
    *engines: Engine,
    settings: DispatcherSettings | None = None,
    config: GatewayConfig | None = None,
) -> AsyncIterator[Stack]:
    """Engines are measured, at free ports; so is the router."""
    for engine in engines:
        engine.metrics_port = 0
    async with fleet(*engines, settings=settings) as dispatcher:
        board = RouterBoard(ROUTER_ID, dispatcher.facts)
        server = build_server(dispatcher, tokenizer, config or loopback(), board)
        port = await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                found = Stack(dispatcher, board, channel, f"127.0.0.1:{port}", server)
                await board.serve("127.0.0.1", 0, found.engines)
                yield found
        finally:
            await board.close()
            await server.stop(grace_s=0)


def request(
    number: int, max_tokens: int = 40, prompt_len: int = 10
) -> inference_pb2.GenerateRequest:
    """Ids that every shadow engine knows; the same number, the same output."""
    ids = [(number * 7 + i * 3) % 97 for i in range(prompt_len)]
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=ids),
        sampling=inference_pb2.SamplingParams(
            max_tokens=max_tokens, temperature=0.0, seed=number, ignore_eos=True
        ),
    )
