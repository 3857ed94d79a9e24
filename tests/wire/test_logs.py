"""Everything that is logged, at the finest level, while marked prompts go through the whole way."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from cluster import logs
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2 as pb
from tests.hop.support import Engine
from tests.wire.stack import ROUTER_ID, Stack, stack
from tests.wire.wire_support import eventually, in_loop

MARK = "XYLOPHONEQUAGMIRE"
"""Letter by letter: the shadow engines know no token that stands for more."""


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    stream = io.StringIO()
    logs.configure("json", "debug", {"router_id": ROUTER_ID}, stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def marked(**sampling: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=20, ignore_eos=True, **sampling)
    return pb.GenerateRequest(text=MARK, sampling=params)


async def read(running: Stack, asked: pb.GenerateRequest) -> tuple[str, list[int], str]:
    """(request id, output ids, output)"""
    request_id, ids, text = "", list[int](), ""
    async for event in running.inference.Generate(asked):
        if event.HasField("accepted"):
            request_id = event.accepted.request_id
        elif event.HasField("delta"):
            ids += event.delta.token_ids
            text += event.delta.text
    return request_id, ids, text


@in_loop
async def run(tokenizer: Tokenizer, seen: list[tuple[str, list[int], str]]) -> None:
    first, second = Engine("e0", step_s=0.005), Engine("e1", step_s=0.005)
    async with stack(tokenizer, first, second) as running:
        reading = [asyncio.create_task(read(running, marked(seed=n))) for n in range(6)]
        await eventually(lambda: first.loop.load.step >= 5)
        # A replay, a refusal of the request itself, a cancelled call: all of them leave lines.
        await first.stop()
        seen += await asyncio.gather(*reading)
        with pytest.raises(grpc.aio.AioRpcError):
            await read(running, marked(temperature=-1.0))
        call = running.inference.Generate(marked(seed=9))
        await call.read()
        call.cancel()
        await asyncio.sleep(0.2)


@in_loop
async def fails(tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, Engine("e0")) as running:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await read(running, marked())
        assert failed.value.code() is grpc.StatusCode.INTERNAL


def test_no_prompt_and_no_output_is_logged(
    tokenizer: Tokenizer, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[int], str]] = []
    run(tokenizer, seen)
    # What breaks in a tokenizer may quote the prompt; that is an INTERNAL for the client.

    def quoting(self: Tokenizer, text: str) -> list[int]:
        raise ValueError(f"cannot tokenise {text!r}")

    monkeypatch.setattr(Tokenizer, "encode", quoting)
    fails(tokenizer)

    text = log.getvalue()
    monkeypatch.undo()
    ids = tokenizer.encode(MARK)
    assert len(seen) == 6
    assert "unexpected error in a call" in text
    assert MARK.lower() not in text.lower()
    for some in (ids, *(output for _, output, _ in seen)):
        for form in (str(some[:3])[1:-1], ",".join(map(str, some[:3]))):
            assert form not in text
    for _, _, output in seen:
        assert output not in text


def test_a_request_can_be_followed(tokenizer: Tokenizer, log: io.StringIO) -> None:
    seen: list[tuple[str, list[int], str]] = []
    run(tokenizer, seen)
    told = lines(log)
    assert {line["router_id"] for line in told} == {ROUTER_ID}
    by_request: dict[str, list[dict[str, Any]]] = {}
    for line in told:
        by_request.setdefault(line.get("request_id", ""), []).append(line)
    replayed = 0
    for request_id, ids, _ in seen:
        own = by_request[request_id]
        end = own[-1]
        assert (end["method"], end["code"], end["output_tokens"]) == ("Generate", "OK", len(ids))
        assert end["total_ms"] >= end["first_token_ms"] > 0
        # Of a stream that had tokens when it changed engines, nobody knows any more.
        assert (end["queue_ms"] is None) == bool(end["replays"])
        assert end["engines"][-1] == "e1"
        replayed += end["replays"]
        assert ("replayed from token" in own[0]["message"]) == bool(end["replays"])
    assert replayed > 0
    codes = [line["code"] for line in told if "code" in line]
    assert codes.count("INVALID_ARGUMENT") == 1
    assert codes.count("CANCELLED") == 1
