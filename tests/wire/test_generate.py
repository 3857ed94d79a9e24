"""A generation over a real connection: events, texts, ends, cancels and deadlines."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.core.errors import (
    EngineLost,
    HeadwayError,
    IllegalTransition,
    Overloaded,
    SequenceFailed,
    SlowReader,
    Unavailable,
)
from cluster.core.outcome import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.router.stream import GenerationRequest, TokenBatch
from cluster.text.tokenizer import Tokenizer
from headway.v1 import inference_pb2 as pb
from tests.wire.wire_support import (
    NAME,
    Script,
    ScriptedSource,
    ScriptedStream,
    Wire,
    details_of,
    eventually,
    gateway,
    in_loop,
    tiny_model,
)

ANSWER = "Once upon a time 안녕하세요 👨‍👩‍👧‍👦 there was"


def events_by_kind(
    events: list[pb.GenerateEvent],
) -> tuple[pb.Accepted, list[pb.Delta], pb.Finished]:
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"delta"}
    return events[0].accepted, [e.delta for e in events[1:-1]], events[-1].finished


async def generate(wire: Wire, **request: object) -> list[pb.GenerateEvent]:
    return [event async for event in wire.inference.Generate(pb.GenerateRequest(**request))]


@pytest.mark.parametrize("batch", [1, 3, 100])
@in_loop
async def test_deltas_are_the_output(tokenizer: Tokenizer, batch: int) -> None:
    """R23: the texts concatenate, the indexes have no gap, usage is what was sent."""
    (eos,) = tokenizer.eos_token_ids
    ids = [*tokenizer.encode(ANSWER), eos]
    async with gateway(tokenizer, Script(ids, batch=batch)) as wire:
        accepted, deltas, finished = events_by_kind(await generate(wire, text="hello"))
        sent = [token_id for delta in deltas for token_id in delta.token_ids]
        assert sent == ids
        assert "".join(delta.text for delta in deltas) == ANSWER
        expected = 0
        for delta in deltas:
            assert delta.first_index == expected
            expected += len(delta.token_ids)
        assert finished.reason == pb.FINISH_REASON_STOP
        assert finished.stop_token_id == eos
        assert finished.usage.completion_tokens == len(ids)
        assert (
            finished.usage.prompt_tokens == accepted.prompt_tokens == len(tokenizer.encode("hello"))
        )
        assert finished.timing.total_s == 0.003
        assert accepted.model == NAME
        assert wire.source.opened[0].request.sampling.seed == accepted.seed
        assert wire.source.opened[0].closed >= 1


@in_loop
async def test_complete_is_generate_in_one_message(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(ANSWER)
    request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=7, seed=5))
    async with gateway(tokenizer, Script(ids, batch=2)) as wire:
        whole = await wire.inference.Complete(request)
        _, deltas, finished = events_by_kind([e async for e in wire.inference.Generate(request)])
        assert list(whole.choices[0].token_ids) == [i for delta in deltas for i in delta.token_ids]
        assert whole.choices[0].text == "".join(delta.text for delta in deltas)
        assert whole.choices[0].finished.usage == finished.usage
        assert whole.accepted.seed == 5
        assert whole.choices[0].finished.reason == pb.FINISH_REASON_LENGTH
        assert whole.choices[0].finished.WhichOneof("matched_stop") is None
        await eventually(lambda: not wire.source.open_streams)


@pytest.mark.parametrize("count", [1, 2, 5])
@in_loop
async def test_exact_counts(tokenizer: Tokenizer, count: int) -> None:
    """R25: min = max gives exactly that many, end-of-text tokens or not."""
    (eos,) = tokenizer.eos_token_ids
    limits = pb.SamplingParams(min_tokens=count, max_tokens=count)
    async with gateway(tokenizer, Script([eos, 70, 71], batch=4)) as wire:
        done = await wire.inference.Complete(pb.GenerateRequest(text="x", sampling=limits))
        assert len(done.choices[0].token_ids) == count
        assert done.choices[0].finished.usage.completion_tokens == count


@pytest.mark.parametrize("batch", [1, 2, 50])
@in_loop
async def test_stop_string_over_several_tokens(tokenizer: Tokenizer, batch: int) -> None:
    """R28, and the ids after the match are neither sent nor counted."""
    ids = tokenizer.encode("go on, STOP and more of it")
    sampling = pb.SamplingParams(stop=["STOP", "never"])
    async with gateway(tokenizer, Script(ids, batch=batch)) as wire:
        events = await generate(wire, text="x", sampling=sampling)
        _, deltas, finished = events_by_kind(events)
        sent = [token_id for delta in deltas for token_id in delta.token_ids]
        assert "".join(delta.text for delta in deltas) == "go on, "
        assert tokenizer.decode(sent) == "go on, STOP"
        assert finished.stop_string == "STOP"
        assert finished.usage.completion_tokens == len(sent)
        assert finished.timing.total_s > 0
        assert not wire.source.open_streams


class PresetStream(ScriptedStream):
    """Hands out given batches."""

    def __init__(self, source: ScriptedSource, request: GenerationRequest) -> None:
        super().__init__(source, request)
        self.batches: list[TokenBatch] = []

    async def next(self) -> TokenBatch:
        return self.batches.pop(0)


class PresetSource(ScriptedSource):
    """Streams of `preset` batches."""

    preset: ClassVar[list[TokenBatch]]

    async def open(self, request: GenerationRequest) -> PresetStream:
        stream = PresetStream(self, request)
        stream.batches = list(self.preset)
        self.opened.append(stream)
        return stream


@pytest.mark.parametrize("last_is_empty", [True, False])
@in_loop
async def test_what_is_held_comes_out_at_the_end(tokenizer: Tokenizer, last_is_empty: bool) -> None:
    """R26: cut in mid-character, and with the beginning of a stop string at the end."""
    half, cut = tokenizer.encode("hi ST"), tokenizer.encode("😀")[:-1]
    for ids, text in [(half, "hi ST"), ([*half, *cut], "hi ST\ufffd")]:
        length = FinishReason.LENGTH
        whole = [TokenBatch(0, ids, 1.0, length)]
        split = [TokenBatch(0, ids, 1.0, None), TokenBatch(len(ids), [], 1.0, length)]
        async with gateway(tokenizer, Script([70])) as wire:
            wire.source.__class__ = PresetSource
            PresetSource.preset = split if last_is_empty else whole
            sampling = pb.SamplingParams(stop=["STOP"])
            request = pb.GenerateRequest(text="x", sampling=sampling)
            done = await wire.inference.Complete(request)
            assert (done.choices[0].text, list(done.choices[0].token_ids)) == (text, ids)
            assert done.choices[0].finished.reason == pb.FINISH_REASON_LENGTH


@in_loop
async def test_what_reaches_the_engine(tokenizer: Tokenizer) -> None:
    """Defaults, the drawn seed and the stop ids are settled at the door."""
    async with gateway(tokenizer, Script([70])) as wire:
        for _ in range(2):
            await wire.inference.Complete(pb.GenerateRequest(text="abc"))
        first, second = (stream.request for stream in wire.source.opened)
        prompt = tuple(tokenizer.encode("abc"))
        assert first.prompt_ids == prompt
        assert first.sampling == SamplingParams(
            max_tokens=256 - len(prompt), seed=first.sampling.seed, stop_token_ids=(2,)
        )
        assert first.sampling.seed != second.sampling.seed
        assert first.request_id != second.request_id
        sampling = pb.SamplingParams(
            max_tokens=3, temperature=0.0, stop_token_ids=[9, 7], ignore_eos=True, seed=2**64 - 1
        )
        ids = pb.TokenIds(ids=[5, 511])
        await wire.inference.Complete(pb.GenerateRequest(token_ids=ids, sampling=sampling))
        third = wire.source.opened[2].request
        assert third.prompt_ids == (5, 511)
        assert third.sampling.stop_token_ids == (7, 9)
        assert third.sampling.seed == 2**64 - 1
        assert third.sampling.greedy


@in_loop
async def test_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi<|im_end|>")])
    async with gateway(tokenizer, Script([70])) as wire:
        tokenized = await wire.inference.Tokenize(pb.TokenizeRequest(chat=chat))
        limit = pb.SamplingParams(max_tokens=1)
        await wire.inference.Complete(pb.GenerateRequest(chat=chat, sampling=limit))
        ids = list(wire.source.opened[0].request.prompt_ids)
        assert ids == list(tokenized.token_ids)
        assert tokenizer.decode(ids) == "user\nhi<|im_end|>\nassistant\n"


@in_loop
async def test_a_cancelled_call_is_freed(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70], step_s=0.01)) as wire:
        call = wire.inference.Generate(pb.GenerateRequest(text="x"))
        await call.read()
        assert len(wire.source.open_streams) == 1
        call.cancel()
        await eventually(lambda: not wire.source.open_streams)


@in_loop
async def test_a_client_that_never_reads_is_freed_when_it_leaves(tokenizer: Tokenizer) -> None:
    # Fills the transport's buffer, so that the handler hangs in a write when the cancel comes.
    ids = tokenizer.encode("x" * 2000)
    model = tiny_model(max_model_len=1 << 20, num_blocks=1 << 16)
    async with gateway(tokenizer, Script(ids, batch=1000)) as wire:
        wire.source.model = model
        call = wire.inference.Generate(pb.GenerateRequest(text="x"))
        await eventually(lambda: len(wire.source.open_streams) == 1)
        await asyncio.sleep(0.3)
        assert len(wire.source.open_streams) == 1
        call.cancel()
        await eventually(lambda: not wire.source.open_streams)


@in_loop
async def test_closed_channel_during_a_unary_call(tokenizer: Tokenizer) -> None:
    """R31."""
    async with gateway(tokenizer, Script([70], step_s=0.01)) as wire:
        call = wire.inference.Complete(pb.GenerateRequest(text="x"))
        waiting = asyncio.ensure_future(asyncio.wait({asyncio.ensure_future(call_result(call))}))
        await eventually(lambda: len(wire.source.open_streams) == 1)
        await wire.channel.close()
        await eventually(lambda: not wire.source.open_streams)
        await waiting


async def call_result(call: grpc.aio.UnaryUnaryCall) -> object:
    try:
        return await call
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        return error


@in_loop
async def test_deadlines(tokenizer: Tokenizer) -> None:
    """R36: many short deadlines, every call DEADLINE_EXCEEDED, nothing left behind."""
    async with gateway(tokenizer, Script([70], step_s=0.01)) as wire:

        async def one(timeout_s: float) -> grpc.StatusCode:
            call = wire.inference.Complete(pb.GenerateRequest(text="x"), timeout=timeout_s)
            return await call.code()

        timeouts = [0.001 * (1 + number % 4) for number in range(200)]
        codes = await asyncio.gather(*map(one, timeouts), one(0.15))
        assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
        await eventually(lambda: not wire.source.open_streams)
        ok = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
        assert (await wire.inference.Complete(ok)).choices[0].finished.usage.completion_tokens == 1


FAILURES = [
    (Unavailable("no engine"), grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", True),
    (Overloaded("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", True),
    (EngineLost("gone"), grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", True),
    (SequenceFailed("NaN logits"), grpc.StatusCode.INTERNAL, "SEQUENCE_FAILED", False),
    (SlowReader("30 s"), grpc.StatusCode.ABORTED, "SLOW_READER", False),
    (IllegalTransition("bug"), grpc.StatusCode.INTERNAL, "INTERNAL", False),
]


@pytest.mark.parametrize(("error", "code", "reason", "retry"), FAILURES, ids=lambda v: str(v)[:20])
@in_loop
async def test_failures_in_mid_stream(
    tokenizer: Tokenizer, error: HeadwayError, code: grpc.StatusCode, reason: str, retry: bool
) -> None:
    """R37: what was sent stays sent, the status says why, and there is no Finished."""
    async with gateway(tokenizer, Script([70], error=error, error_after=2)) as wire:
        call = wire.inference.Generate(pb.GenerateRequest(text="x"))
        seen = [(await call.read()).WhichOneof("event") for _ in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert seen == ["accepted", "delta", "delta"]
        assert caught.value.code() is code
        details = details_of(caught.value)
        assert details["ErrorInfo"].reason == reason
        assert details["ErrorInfo"].domain == "headway"
        assert ("RetryInfo" in details) is retry
        assert not wire.source.open_streams


@in_loop
async def test_an_unexpected_error_keeps_its_text_to_itself(tokenizer: Tokenizer) -> None:
    class Broken(ScriptedSource):
        async def open(self, request: object) -> object:
            raise KeyError("secret of the house")

    async with gateway(tokenizer, Script([70])) as wire:
        wire.source.__class__ = Broken
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.inference.Complete(pb.GenerateRequest(text="x"))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in caught.value.details()


@in_loop
async def test_before_a_first_engine(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70])) as wire:
        wire.source.model = None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.inference.Complete(pb.GenerateRequest(text="x"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value)["RetryInfo"].retry_delay.seconds == 1


@in_loop
async def test_a_stop_in_service_waits_for_streams(tokenizer: Tokenizer) -> None:
    """R44: a graceful stop fails no stream that ends in time."""
    ids = tokenizer.encode("abcdefghij")
    async with gateway(tokenizer, Script(ids, step_s=0.02)) as wire:
        limit = pb.SamplingParams(max_tokens=10)
        running = asyncio.ensure_future(generate(wire, text="x", sampling=limit))
        await eventually(lambda: len(wire.source.open_streams) == 1)
        await wire.server.stop(grace_s=5)
        _, _, finished = events_by_kind(await running)
        assert finished.usage.completion_tokens == 10


@in_loop
async def test_health_gives_notice_before_calls_are_refused(tokenizer: Tokenizer) -> None:
    limit = pb.SamplingParams(max_tokens=1)
    request = pb.GenerateRequest(text="x", sampling=limit)
    async with gateway(tokenizer, Script([70])) as wire:
        health = health_pb2_grpc.HealthStub(wire.channel)
        stopping = asyncio.ensure_future(wire.server.stop(grace_s=1, notice_s=0.3))
        await asyncio.sleep(0.05)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await wire.inference.Complete(request)
        await stopping
        assert await wire.inference.Complete(request).code() is grpc.StatusCode.UNAVAILABLE


@in_loop
async def test_grace_ends(tokenizer: Tokenizer) -> None:
    async with gateway(tokenizer, Script([70], step_s=0.02)) as wire:
        running = asyncio.ensure_future(generate(wire, text="x"))
        await eventually(lambda: len(wire.source.open_streams) == 1)
        await wire.server.stop(grace_s=0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        await eventually(lambda: not wire.source.open_streams)
