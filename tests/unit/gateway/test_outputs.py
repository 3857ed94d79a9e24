"""Several outputs through one writer: in order, one message at a time, nothing read ahead."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from cluster.core.errors import SlowReader
from cluster.core.outcome import FinishReason
from cluster.core.plan import TokenLogprob
from cluster.core.sampling import SamplingParams
from cluster.gateway import mapping
from cluster.gateway.calls import Call
from cluster.gateway.outputs import Output, send_outputs
from cluster.metrics.router import NoStreamMeter
from cluster.router.stream import GenerationRequest, StreamTiming, TokenBatch
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2
from tests.wire.wire_support import in_loop

REQUEST = GenerationRequest("id", (5, 6), SamplingParams(max_tokens=50))


class Counted:
    """A stream of single tokens that are always there at once."""

    resume_token = ""

    def __init__(self, length: int, error: Exception | None = None) -> None:
        self.timing = StreamTiming()
        self.read = 0
        self.left = False
        self.prompt: list[TokenLogprob] = []
        self._length = length
        self._error = error

    async def next(self) -> TokenBatch:
        if self._error is not None and self.read == self._length:
            raise self._error
        self.read += 1
        finish = None if self._error or self.read < self._length else FinishReason.LENGTH
        return TokenBatch(self.read - 1, [70], 1.0, finish, prompt_logprobs=self.prompt)

    def leave(self) -> None:
        self.left = True

    def end(self) -> None: ...


def outputs(*streams: Counted) -> list[Output]:
    call = Call("Generate")
    return [
        Output(call, replace(REQUEST, choice=number), stream, NoStreamMeter())
        for number, stream in enumerate(streams)
    ]


@in_loop
async def test_a_writer_that_is_stuck_lets_nobody_read_ahead(tokenizer: Tokenizer) -> None:
    streams = [Counted(50) for _ in range(4)]
    gate = asyncio.Event()

    async def stuck(event: inference_pb2.GenerateEvent) -> None:
        await gate.wait()

    work = asyncio.ensure_future(send_outputs(outputs(*streams), tokenizer.detokenizer, stuck))
    await asyncio.sleep(0.05)
    assert [stream.read for stream in streams] == [1, 1, 1, 1]
    gate.set()
    await work
    assert [stream.read for stream in streams] == [50, 50, 50, 50]


@in_loop
async def test_messages_go_one_at_a_time_and_nobody_is_kept_waiting(tokenizer: Tokenizer) -> None:
    writing = 0
    sent: list[int] = []

    async def send(event: inference_pb2.GenerateEvent) -> None:
        nonlocal writing
        writing += 1
        await asyncio.sleep(0)
        assert writing == 1
        writing -= 1
        if event.HasField("delta"):
            sent.append(event.delta.choice)

    await send_outputs(outputs(*(Counted(20) for _ in range(3))), tokenizer.detokenizer, send)
    for at in range(0, 60, 3):
        assert sorted(sent[at : at + 3]) == [0, 1, 2]


@in_loop
async def test_the_first_failure_is_the_call_s(tokenizer: Tokenizer) -> None:
    streams = [Counted(1 << 20), Counted(3, SlowReader("too slow")), Counted(2)]
    seen: list[inference_pb2.GenerateEvent] = []

    async def send(event: inference_pb2.GenerateEvent) -> None:
        seen.append(event)
        await asyncio.sleep(0)

    with pytest.raises(SlowReader):
        await send_outputs(outputs(*streams), tokenizer.detokenizer, send)
    read = streams[0].read
    await asyncio.sleep(0.01)
    assert streams[0].read == read, "it was read on after the end"
    assert [event.finished.choice for event in seen if event.HasField("finished")] == [2]


@in_loop
async def test_a_cancel_ends_every_reader(tokenizer: Tokenizer) -> None:
    streams = [Counted(1 << 20) for _ in range(3)]

    async def send(event: inference_pb2.GenerateEvent) -> None:
        await asyncio.sleep(0)

    work = asyncio.ensure_future(send_outputs(outputs(*streams), tokenizer.detokenizer, send))
    await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    read = [stream.read for stream in streams]
    await asyncio.sleep(0.01)
    assert [stream.read for stream in streams] == read


@in_loop
async def test_a_long_log_that_is_gone_on_with_leaves_the_loop_to_others(
    tokenizer: Tokenizer,
) -> None:
    delivered = (70,) * 64 * 100
    streams = [Counted(1) for _ in range(4)]
    call = Call("Resume")
    ready = [
        Output(call, replace(REQUEST, choice=n, emitted_ids=delivered), stream, NoStreamMeter())
        for n, stream in enumerate(streams)
    ]

    async def send(event: inference_pb2.GenerateEvent) -> None: ...

    work = asyncio.ensure_future(send_outputs(ready, tokenizer.detokenizer, send))
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    await work
    assert turns >= 4 * 100, "64 tokens of one output in a turn"


@in_loop
async def test_very_many_log_probabilities_are_made_into_a_message_elsewhere(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    made = mapping.delta_event

    def noting(*args: Any) -> inference_pb2.GenerateEvent:
        threads.append(threading.current_thread().name)
        return made(*args)

    monkeypatch.setattr(mapping, "delta_event", noting)
    score = TokenLogprob(7, -1.0, [(7, -1.0)] * 20)
    for prompt_tokens in (10, 10_000):
        stream = Counted(1)
        stream.prompt = [score] * prompt_tokens
        sent: list[inference_pb2.GenerateEvent] = []

        async def send(event: inference_pb2.GenerateEvent) -> None:
            sent.append(event)  # noqa: B023

        await send_outputs(outputs(stream), tokenizer.detokenizer, send)
        assert len(sent[0].delta.prompt_logprobs) == prompt_tokens
    first, second = threads
    assert first == threading.current_thread().name != second
