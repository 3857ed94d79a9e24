"""Headway itself, over the stubs: the typed client makes objects that nobody needs here."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from cluster.core.errors import HeadwayError
from headway.client import Connection
from headway.errors import HeadwayRpcError, from_rpc_error
from headway.messages import generate_request, status_of
from headway.types import Delivery, Sampling
from headway.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from loadtests.prompts import PromptMaker, corpus_text
from loadtests.records import Record
from loadtests.scenario import PlannedRequest
from loadtests.targets.base import Sink, TargetSpec, Units

PREPARE_TIMEOUT_S = 60.0
CONNECTIONS_PER_ROUTER = 4
"""Where there are several routers. Which of them gets a connection is the kernel's draw."""


class HeadwayTarget:
    """One connection; before several routers some, which take turns, as the clients that stand
    behind a load would have theirs. Prompts go out as token ids, so their lengths are exact."""

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._connection = Connection(
            spec.address,
            api_key=os.environ.get("HEADWAY_API_KEY"),
            ca_file=None if spec.ca_file is None else Path(spec.ca_file),
        )
        self._metadata = self._connection.metadata()
        self._max_len = 0

    async def open(self, seed: int) -> None:
        first = self._connection.aio_channel()
        self._channels = [first]
        inference = inference_pb2_grpc.InferenceStub(first)  # type: ignore[no-untyped-call]
        self._admin = admin_pb2_grpc.AdminStub(first)  # type: ignore[no-untyped-call]
        try:
            model = await self._call(inference.GetModel, inference_pb2.GetModelRequest())
            text = inference_pb2.TokenizeRequest(text=corpus_text())
            pool = list((await self._call(inference.Tokenize, text)).token_ids)
            status = await self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest())
        except grpc.RpcError as error:
            raise HeadwayError(f"{self._spec.address}: {from_rpc_error(error)}") from error
        if status.peers:
            connections = CONNECTIONS_PER_ROUTER * (1 + len(status.peers))
            self._channels += [self._connection.aio_channel() for _ in range(connections - 1)]
            await self._all_ready()
        stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]
        self._turns = itertools.cycle(stubs)
        self._max_len = model.model.max_model_len
        self._prompts = PromptMaker(pool, seed)

    async def _all_ready(self) -> None:
        """Connecting is no part of a request's time to its first token."""
        ready = asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        try:
            await asyncio.wait_for(ready, PREPARE_TIMEOUT_S)
        except TimeoutError as error:
            raise HeadwayError(
                f"{self._spec.address}: not all of {len(self._channels)} connections were up "
                f"within {PREPARE_TIMEOUT_S:g} s; does one of the routers hang?"
            ) from error

    def new_units(self, request: PlannedRequest) -> Units:
        return self._prompts.make(request)

    async def send(self, prompt: Units, request: PlannedRequest, sink: Sink) -> None:
        room = max(1, self._max_len - request.output_length)
        sampling = Sampling(
            max_tokens=min(request.output_length, self._max_len - 1),
            temperature=1.0,
            seed=request.number,
            ignore_eos=True,
        )
        delivery = Delivery(
            tenant=f"tenant-{request.tenant}",
            priority=request.priority,
            session=f"session-{request.session}" if request.session >= 0 else "",
        )
        message = generate_request(prompt[-room:], sampling, self._spec.model, delivery)
        inference = next(self._turns)
        call = inference.Generate(message, timeout=self._spec.timeout_s, metadata=self._metadata)
        clock = time.perf_counter
        try:
            async for event in call:
                now = clock()
                kind = event.WhichOneof("event")
                if kind == "delta":
                    delta = event.delta
                    ids = delta.token_ids
                    if ids:
                        sink.delta(now, delta.first_index, len(ids), delta.emit_time_unix_us / 1e6)
                        sink.output += ids
                elif kind == "finished":
                    _finish(sink.record, event.finished)
            if sink.record.expected < 0:
                sink.record.error = "NO_FINISHED"
        except grpc.RpcError as error:
            sink.record.error = _error_name(from_rpc_error(error))
        finally:
            call.cancel()

    async def status(self) -> list[dict[str, Any]]:
        try:
            answer = await self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest())
        except grpc.RpcError:
            return []
        return [asdict(engine) for engine in status_of(answer).engines]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    async def _call(self, method: Any, message: Any) -> Any:
        return await method(message, timeout=PREPARE_TIMEOUT_S, metadata=self._metadata)


def _finish(record: Record, finished: inference_pb2.Finished) -> None:
    timing = finished.timing
    record.expected = finished.usage.completion_tokens
    record.prompt_tokens = finished.usage.prompt_tokens
    record.queue_s = timing.queue_s if timing.HasField("queue_s") else None
    record.server_first_s = timing.first_token_s if timing.HasField("first_token_s") else None
    record.server_total_s = timing.total_s if timing.HasField("total_s") else None
    record.preemptions = timing.preemptions
    record.replays = timing.replays
    record.engine = timing.engine_ids[-1] if timing.engine_ids else ""


def _error_name(error: HeadwayRpcError) -> str:
    return error.reason or error.code.name
