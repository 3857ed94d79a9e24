"""A TokenSource that plays a script, and a real gateway on loopback in front of it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ParamSpec

import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from cluster.core.errors import HeadwayError, UnknownResumeToken
from cluster.core.modelinfo import ModelInfo
from cluster.core.outcome import DrainOrder, FinishReason
from cluster.gateway.config import GatewayConfig, Limits
from cluster.gateway.server import GatewayServer, build_server
from cluster.metrics.facts import RouterCounters, RouterFacts
from cluster.router.stream import (
    EngineStatus,
    GenerationRequest,
    Resumed,
    StreamTiming,
    TokenBatch,
)
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2_grpc

NAME = "tiny"
P = ParamSpec("P")


def in_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an asynchronous test in a loop of its own, 30 s at the most."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), timeout=30))

    return run


def tiny_model(**changes: object) -> ModelInfo:
    facts: dict[str, object] = {
        "name": NAME,
        "architecture": "LlamaForCausalLM",
        "fingerprint": "f00d",
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": 512,
        "max_model_len": 256,
        "num_blocks": 64,
        "block_size": 16,
        "kv_bytes_per_token": 64,
        "weight_bytes": 1 << 20,
    }
    return ModelInfo(**{**facts, **changes})  # type: ignore[arg-type]


@dataclass
class Script:
    """What every stream does: `ids` in turn until max_tokens or a stop token, `batch` at a time,
    one batch per `step_s`; `error` ends it after `error_after` ids."""

    ids: Sequence[int]
    batch: int = 1
    step_s: float = 0.0
    error: HeadwayError | None = None
    error_after: int = 0


class ScriptedStream:
    """Plays a script for one request, as an engine would: the stop token is the last id."""

    def __init__(self, source: ScriptedSource, request: GenerationRequest) -> None:
        self.timing = StreamTiming(queue_s=0.001, first_token_s=0.002)
        self.request = request
        self.closed = 0
        self._source = source
        self._script = source.script
        self._sent = len(request.emitted_ids)
        self.resume_token = ""

    async def next(self) -> TokenBatch:
        script, params = self._script, self.request.sampling
        await asyncio.sleep(script.step_s)
        if script.error is not None and self._sent >= script.error_after:
            raise script.error
        first, ids, finish = self._sent, [], None
        while len(ids) < script.batch and finish is None:
            token_id = script.ids[self._sent % len(script.ids)]
            ids.append(token_id)
            self._sent += 1
            if token_id in params.stop_token_ids and self._sent > params.min_tokens:
                finish = FinishReason.STOP
            elif self._sent == params.max_tokens:
                finish = FinishReason.LENGTH
        if finish is not None:
            self.timing.total_s = 0.003
        return TokenBatch(first, ids, time.time(), finish)

    def leave(self) -> None:
        self.closed += 1
        self._source.open_streams.discard(self)

    def end(self) -> None:
        """A script needs no telling."""


@dataclass(eq=False)
class ScriptedSource:
    """One pretended engine. `opened` keeps every stream, `open_streams` those not closed."""

    script: Script
    model: ModelInfo | None = field(default_factory=tiny_model)
    is_ready: bool = True
    open_error: HeadwayError | None = None
    opened: list[ScriptedStream] = field(default_factory=list)
    open_streams: set[ScriptedStream] = field(default_factory=set)
    drained: list[tuple[str, DrainOrder]] = field(default_factory=list)
    counters: RouterCounters = field(default_factory=RouterCounters)

    def ready(self) -> bool:
        return self.is_ready

    async def open(self, request: GenerationRequest) -> ScriptedStream:
        if self.open_error is not None:
            raise self.open_error
        stream = ScriptedStream(self, request)
        self.opened.append(stream)
        self.open_streams.add(stream)
        return stream

    async def open_all(self, requests: Sequence[GenerationRequest]) -> list[ScriptedStream]:
        return [await self.open(request) for request in requests]

    async def resume_all(self, token: str, positions: Mapping[int, int]) -> list[Resumed]:
        raise UnknownResumeToken("a script keeps nothing")

    def forget(self, token: str) -> None:
        """Nothing is kept."""

    def facts(self) -> RouterFacts:
        streams = len(self.open_streams)
        return RouterFacts(streams, 3, 450, 7, 2 if self.is_ready else 0, 0, self.counters)

    def drain(self, engine_id: str, order: DrainOrder) -> int | None:
        self.drained.append((engine_id, order))
        if engine_id not in ("engine-a", "engine-b"):
            return None
        # What engine-b has never moves.
        return 0 if engine_id == "engine-a" and order is DrainOrder.MOVE else 5

    def engines(self) -> list[EngineStatus]:
        return [
            EngineStatus(
                engine_id=name,
                address="127.0.0.1:7000",
                epoch=3,
                connected=self.is_ready,
                blocks_total=64,
                blocks_free=60,
                running=len(self.open_streams),
                waiting=1,
                step=17,
                tokens_per_s=12.5,
                preemptions=2,
                frame_age_s=0.05,
            )
            for name in ("engine-b", "engine-a")
        ]


@dataclass
class Wire:
    """A running gateway and a channel to it."""

    source: ScriptedSource
    tokenizer: Tokenizer
    server: GatewayServer
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)


@asynccontextmanager
async def gateway(
    tokenizer: Tokenizer, script: Script, config: GatewayConfig | None = None
) -> AsyncIterator[Wire]:
    """A gateway on a free port, stopped without grace at the end."""
    source = ScriptedSource(script)
    server = build_server(source, tokenizer, config or loopback())
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Wire(source, tokenizer, server, channel)
    finally:
        await server.stop(grace_s=0)


def loopback(**changes: object) -> GatewayConfig:
    limits = changes.pop("limits", Limits())
    return GatewayConfig(address="127.0.0.1:0", limits=limits, **changes)  # type: ignore[arg-type]


def details_of(error: grpc.aio.AioRpcError) -> dict[str, object]:
    """The google.rpc details of a failed call by name: "ErrorInfo", "BadRequest", "RetryInfo"."""
    kinds = {
        kind.DESCRIPTOR.name: kind
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        )
    }
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    found: dict[str, object] = {}
    for detail in status.details:
        name = detail.type_url.rpartition(".")[2]
        found[name] = kinds[name].FromString(detail.value)
    return found


async def eventually(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    """Wait until `condition` holds; AssertionError after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true")
        await asyncio.sleep(0.005)
