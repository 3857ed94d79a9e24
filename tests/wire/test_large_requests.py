"""Messages as large as the transport lets through, with as many parts as they have room for.

Whatever such a message is refused for, the event loop must not look at its parts one by one: with
two million of them it would stand still for seconds, and every stream with it. What is counted are
lines of our own code that the loop's thread runs, so that the machine's speed does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest

import cluster
from cluster.gateway import mapping
from cluster.gateway.config import Limits
from cluster.text.tokenizer import Tokenizer
from headway.client import AsyncClient, InvalidRequest
from headway.v1 import inference_pb2 as pb
from tests.wire.wire_support import Script, gateway

OURS = str(Path(cluster.__file__).parent)
ROOM = Limits().max_message_bytes - 256
"""Bytes for the parts."""
MOST_LINES = 20_000
PREFIX = "/headway.v1.Inference/"


def generate(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="a", **fields)


def sampled(**fields: Any) -> pb.GenerateRequest:
    return generate(sampling=pb.SamplingParams(**fields))


def chat(*messages: pb.ChatMessage) -> pb.ChatInput:
    return pb.ChatInput(messages=messages)


UNKNOWN = 1_000
"""No id of the model; two bytes on the wire."""
REQUESTS: dict[str, Callable[[], pb.GenerateRequest | pb.ResumeRequest]] = {
    "token_ids": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[UNKNOWN] * (ROOM // 2))),
    "chat.messages": lambda: pb.GenerateRequest(chat=chat(*[pb.ChatMessage()] * (ROOM // 2))),
    "text": lambda: pb.GenerateRequest(text="a b" * (ROOM // 3)),
    "chat": lambda: pb.GenerateRequest(
        chat=chat(pb.ChatMessage(role="user", content="a b" * (ROOM // 3)))
    ),
    "sampling.stop": lambda: sampled(stop=[""] * (ROOM // 2)),
    "sampling.stop_token_ids": lambda: sampled(stop_token_ids=[UNKNOWN] * (ROOM // 2)),
    "sampling.allowed_token_ids": lambda: sampled(allowed_token_ids=[UNKNOWN] * (ROOM // 2)),
    "sampling.logit_bias": lambda: sampled(
        logit_bias={UNKNOWN + i: 1.0 for i in range(ROOM // 16)}
    ),
    "emitted": lambda: generate(emitted=[pb.Emitted(choice=1)] * (ROOM // 5)),
    "emitted[0].token_ids": lambda: generate(
        emitted=[pb.Emitted(token_ids=[UNKNOWN] * (ROOM // 2))],
        sampling=pb.SamplingParams(seed=1),
    ),
    "positions": lambda: pb.ResumeRequest(
        resume_token="x", positions=[pb.Position(choice=1)] * (ROOM // 4)
    ),
}


@contextlib.contextmanager
def counted_lines() -> Iterator[Callable[[], int]]:
    """How many lines of ours this thread has run."""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        if count > 10 * MOST_LINES:
            sys.settrace(None)  # it is far too much already, and tracing makes it slow
            frame.f_trace = None
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)


def refused(address: str, message: pb.GenerateRequest | pb.ResumeRequest) -> grpc.RpcError:
    """From a thread of its own, past every check of our client."""
    method = "Resume" if isinstance(message, pb.ResumeRequest) else "Generate"
    with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
        stub = channel.unary_stream(
            PREFIX + method, request_serializer=type(message).SerializeToString
        )
        with pytest.raises(grpc.RpcError) as error:
            list(stub(message))
        return error.value


@pytest.mark.parametrize("field", REQUESTS)
def test_the_loop_does_not_look_at_every_part(tokenizer: Tokenizer, field: str) -> None:
    async def scenario() -> None:
        async with gateway(tokenizer, Script([70])) as wire:
            message = REQUESTS[field]()
            assert message.ByteSize() > ROOM // 2
            with counted_lines() as lines:
                error: Any = await asyncio.to_thread(refused, wire.address, message)
                assert lines() < MOST_LINES
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(f"{field}: ")

    asyncio.run(scenario())


def test_tokenize_tells_many_ids_and_not_any_number(tokenizer: Tokenizer) -> None:
    """Of a text that fits no request, too: people count with it."""

    async def scenario() -> None:
        async with gateway(tokenizer, Script([70])) as wire, AsyncClient(wire.address) as client:
            most = mapping.MAX_TOLD_IDS
            assert len(await client.tokenize("a" * most)) == most
            with pytest.raises(InvalidRequest, match=f"{most + 1} tokens, and {most} are told"):
                await client.tokenize("a" * (most + 1))

    asyncio.run(scenario())
