"""The Admin service: the router's view of the fleet, for operators."""

from __future__ import annotations

from typing import Any

import grpc.aio

from cluster.gateway import mapping
from cluster.gateway.interceptors import InFlight
from cluster.gateway.status import UnknownEngine, answer
from cluster.metrics.board import RouterBoard
from cluster.router.stream import TokenSource
from cluster.text.tokenizer import Tokenizer
from headway.v1 import admin_pb2, admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Answers from what the router has in memory.

    in_flight: the gauge of calls in progress. board: this router and its peers.
    """

    def __init__(
        self, source: TokenSource, tokenizer: Tokenizer, in_flight: InFlight, board: RouterBoard
    ) -> None:
        self._source = source
        self._in_flight = in_flight
        self._board = board
        self._text = mapping.ModelText(
            tokenizer.eos_token_ids, tokenizer.defaults, tokenizer.has_chat_template
        )

    async def GetStatus(
        self,
        request: admin_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> admin_pb2.GetStatusResponse:
        return await answer(context, self._status())

    async def DrainEngine(
        self,
        request: admin_pb2.DrainEngineRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> admin_pb2.DrainEngineResponse:
        return await answer(context, self._drain(request))

    async def _drain(self, request: admin_pb2.DrainEngineRequest) -> admin_pb2.DrainEngineResponse:
        remaining = self._source.drain(request.engine_id, mapping.drain_order(request))
        if remaining is None:
            known = ", ".join(sorted(e.engine_id for e in self._source.engines())) or "none"
            raise UnknownEngine(f"no engine {request.engine_id[:128]!r} here; there are: {known}")
        return admin_pb2.DrainEngineResponse(remaining=remaining)

    async def _status(self) -> admin_pb2.GetStatusResponse:
        model = self._source.model
        engines = sorted(self._source.engines(), key=lambda engine: engine.engine_id)
        return admin_pb2.GetStatusResponse(
            router=mapping.router_message(
                self._board.summary()._replace(
                    calls=self._in_flight.active, ready=self._source.ready()
                )
            ),
            peers=[
                mapping.router_message(peer)
                for peer in sorted(self._board.peers, key=lambda peer: peer.router_id)
            ],
            model=None if model is None else mapping.model_message(model, self._text),
            engines=[mapping.engine_message(engine) for engine in engines],
        )
