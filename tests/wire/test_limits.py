"""What is refused at the door, how, and that nobody else notices: R01, R12, R49, R52."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path

import grpc
import pytest

from cluster.core.errors import ConfigError
from cluster.gateway.config import Limits
from cluster.gateway.server import ADMIN, INFERENCE
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2 as pb
from tests.wire.wire_support import (
    Script,
    Wire,
    details_of,
    eventually,
    gateway,
    in_loop,
    loopback,
    tiny_model,
)

NEVER = [math.nan, math.inf, -math.inf, -1.0, 1e-8, 2.0**31]
BAD_FIELDS = [
    *(("temperature", value) for value in NEVER),
    *(("top_p", value) for value in NEVER),
    # 1e-8 is too small to mean anything; 0 would.
    *(("min_p", value) for value in NEVER),
    *(("top_k", value) for value in (-1, 2**31, 2**63 - 1)),
    *(("max_tokens", value) for value in (-1, 0, 2**31, 2**63 - 1)),
    *(("min_tokens", value) for value in (-1, 2**31)),
    ("top_p", 0.0),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", [2**32 - 1]),
    ("stop_token_ids", list(range(100))),
    ("stop", [""]),
    ("stop", ["x" * 257]),
    ("stop", ["x"] * 17),
]


async def refusal(wire: Wire, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error of Generate, which must be the same for Complete; nothing may have been opened."""
    before = len(wire.source.opened)
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await wire.inference.Complete(request)
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        async for _ in wire.inference.Generate(request):
            pass
    assert stream.value.code() is unary.value.code()
    assert stream.value.details() == unary.value.details()
    assert len(wire.source.opened) == before
    return stream.value


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    return [v.field for v in details_of(error)["BadRequest"].field_violations]


@in_loop
async def test_bad_numbers_are_named_and_neighbours_go_on(tokenizer: Tokenizer) -> None:
    """R52, every numeric field, next to a stream that must not change."""
    ids = tokenizer.encode("a neighbour that must not notice anything of it")
    async with gateway(tokenizer, Script(ids, step_s=0.001)) as wire:
        good = pb.GenerateRequest(text="ok", sampling=pb.SamplingParams(max_tokens=200))
        neighbour = asyncio.ensure_future(call(wire, good))
        await eventually(lambda: len(wire.source.opened) == 1)
        for name, value in BAD_FIELDS:
            request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**{name: value}))
            error = await refusal(wire, request)
            found = fields_of(error)
            assert len(found) == 1, (name, value, found)
            assert found[0].startswith(f"sampling.{name}"), (name, value, found)
        done = await neighbour
        assert list(done.choices[0].token_ids) == [ids[at % len(ids)] for at in range(200)]


async def call(wire: Wire, request: pb.GenerateRequest) -> pb.CompleteResponse:
    return await wire.inference.Complete(request)


@in_loop
async def test_all_violations_come_at_once_in_a_small_trailer(tokenizer: Tokenizer) -> None:
    sampling = pb.SamplingParams(
        temperature=math.nan, top_p=-1, min_p=7, top_k=-3, max_tokens=-1, stop=["x" * 300] * 16
    )
    async with gateway(tokenizer, Script([70])) as wire:
        error = await refusal(wire, pb.GenerateRequest(text="x", sampling=sampling))
        assert len(fields_of(error)) == 8
        assert len(error.details().encode()) < 1024
        trailers = dict(error.trailing_metadata())
        assert len(trailers["grpc-status-details-bin"]) < 4096


@pytest.mark.parametrize(
    ("request_fields", "field", "words"),
    [
        ({}, "input", ["must be set"]),
        ({"text": ""}, "text", ["empty"]),
        ({"token_ids": pb.TokenIds()}, "token_ids", ["empty"]),
        ({"chat": pb.ChatInput()}, "chat", ["empty"]),
        ({"token_ids": pb.TokenIds(ids=[1, 512])}, "token_ids.ids[1]", ["512"]),
        ({"token_ids": pb.TokenIds(ids=[2**32 - 1])}, "token_ids.ids[0]", ["4294967295"]),
        ({"token_ids": pb.TokenIds(ids=[1] * 256)}, "token_ids", ["256"]),
        ({"token_ids": pb.TokenIds(ids=[1] * 1100)}, "token_ids", ["1100", "256"]),
        (
            {"token_ids": pb.TokenIds(ids=[1] * 200), "sampling": pb.SamplingParams(max_tokens=57)},
            "sampling.max_tokens",
            ["57", "200", "256", "56"],
        ),
        (
            {"chat": pb.ChatInput(messages=[pb.ChatMessage(role="<|im_end|>", content="x")])},
            "chat.messages[0].role",
            ["im_end"],
        ),
    ],
)
@in_loop
async def test_bad_inputs(
    tokenizer: Tokenizer, request_fields: dict[str, object], field: str, words: list[str]
) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        error = await refusal(wire, pb.GenerateRequest(**request_fields))
        assert fields_of(error) == [field]
        assert all(word in error.details() for word in words), error.details()


@in_loop
async def test_a_prompt_that_just_fits(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        done = await wire.inference.Complete(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 255))
        )
        assert done.accepted.max_tokens == 1
        assert len(done.choices[0].token_ids) == 1


@in_loop
async def test_a_prompt_over_the_pool(tokenizer: Tokenizer) -> None:
    """R01: 64 blocks of 16 cannot hold 1,100 tokens, whatever the model could."""
    async with gateway(tokenizer, Script([70])) as wire:
        wire.source.model = tiny_model(max_model_len=8192)
        error = await refusal(wire, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 1100)))
        assert fields_of(error) == ["token_ids"]
        assert "1024" in error.details()
        short = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=3))
        done = await asyncio.gather(*(call(wire, short) for _ in range(5)))
        assert all(len(one.choices[0].token_ids) == 3 for one in done)


@in_loop
async def test_unknown_model(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        error = await refusal(wire, pb.GenerateRequest(model="other", text="x"))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert details_of(error)["ErrorInfo"].reason == "MODEL_NOT_FOUND"
        known = pb.GetModelRequest(model="tiny")
        answer = await wire.inference.GetModel(known)
        assert answer.model.max_model_len == 256
        assert answer.model.eos_token_ids == [2]
        assert answer.model.has_chat_template
        assert answer.default_sampling.temperature == 1.0


@in_loop
async def test_message_size(tokenizer: Tokenizer) -> None:
    """R49: the documented limit is the limit, to the byte, and the connection survives."""
    limit = 4 << 20
    async with gateway(tokenizer, Script([70])) as wire:
        documented = await wire.inference.GetModel(pb.GetModelRequest())
        assert documented.max_message_bytes == limit
        overhead = pb.GenerateRequest(model="m" * limit).ByteSize() - limit
        for size, code in [
            (limit, grpc.StatusCode.NOT_FOUND),
            (limit + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ]:
            request = pb.GenerateRequest(model="m" * (size - overhead))
            assert request.ByteSize() == size
            assert await wire.inference.Complete(request).code() is code
        ok = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
        await wire.inference.Complete(ok)


@in_loop
async def test_metadata_size(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
        for _ in range(5):
            small = wire.inference.Complete(request, metadata=(("x-note", "a" * 7000),))
            assert await small.code() is grpc.StatusCode.OK
            large = wire.inference.Complete(request, metadata=(("x-note", "a" * 9000),))
            assert await large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@in_loop
async def test_overload_says_when_to_come_back(tokenizer: Tokenizer) -> None:
    """R12: refused, never dropped; a place that is left can be taken."""
    config = loopback(limits=Limits(max_in_flight=2, retry_after_s=2.5))
    async with gateway(tokenizer, Script([70], step_s=0.01), config) as wire:
        running = [wire.inference.Generate(pb.GenerateRequest(text="x")) for _ in range(2)]
        for stream in running:
            await stream.read()
        error = await refusal(wire, pb.GenerateRequest(text="x"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error)
        assert details["ErrorInfo"].reason == "OVERLOADED"
        assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 2.5
        await wire.inference.GetModel(pb.GetModelRequest())
        running[0].cancel()
        await eventually(lambda: len(wire.source.open_streams) == 1)
        ok = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
        await wire.inference.Complete(ok)


@in_loop
async def test_api_keys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# for tests\nfirst-key\n\nsecond-key\n", "utf-8")
    async with gateway(tokenizer, Script([70]), loopback(api_keys_file=keys)) as wire:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
        for headers in [(), (("authorization", "Bearer third-key"),), (("authorization", "x"),)]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wire.inference.Complete(request, metadata=headers)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert details_of(caught.value)["ErrorInfo"].reason == "UNAUTHENTICATED"
            stream = wire.inference.Generate(request, metadata=headers)
            assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        for key in ("first-key", "second-key"):
            headers = (("authorization", f"Bearer {key}"),)
            await wire.inference.Complete(request, metadata=headers)
        assert len(wire.source.opened) == 2


@in_loop
async def test_a_taken_port_is_a_clear_error(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        taken = dataclasses.replace(loopback(), address=wire.address)
        with pytest.raises(ConfigError, match=str(wire.server.port)):
            async with gateway(tokenizer, Script([70]), taken):
                pass


@in_loop
async def test_processes_can_share_a_port_when_asked(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70]), loopback(reuse_port=True)) as wire:
        shared = dataclasses.replace(loopback(reuse_port=True), address=wire.address)
        async with gateway(tokenizer, Script([70]), shared) as other:
            assert other.server.port == wire.server.port


BROKEN = [
    b"\xff\xff\xff",
    # Field 1 (model) and the first text, whose bytes are no UTF-8.
    b"\x0a\x02\xff\xfe",
]


@pytest.mark.parametrize("raw", BROKEN)
@in_loop
async def test_a_message_that_cannot_be_read_is_a_bad_request(
    tokenizer: Tokenizer, raw: bytes
) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        prefix = f"/{INFERENCE}"
        unary = wire.channel.unary_unary(f"{prefix}/Complete", lambda _: raw)
        stream = wire.channel.unary_stream(f"{prefix}/Generate", lambda _: raw)
        admin = wire.channel.unary_unary(f"/{ADMIN}/DrainEngine", lambda _: raw)
        for call_of in (unary, admin):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_of(None)
            assert fields_of(caught.value) == ["request"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream(None):
                pass
        assert fields_of(caught.value) == ["request"]
        assert "Generate" in caught.value.details()
        assert wire.source.opened == []
        assert len((await call(wire, pb.GenerateRequest(text="ok"))).choices) == 1
