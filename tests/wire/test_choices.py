"""n outputs of one call over a real connection: each as it is alone, all of them as one call."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from cluster.core.errors import SequenceFailed, Unavailable
from cluster.core.sampling import choice_seed
from cluster.gateway.server import build_server
from cluster.hop.link import LinkSettings
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.router.stream import GenerationRequest
from cluster.text.tokenizer import Tokenizer
from headway.client import (
    AsyncClient,
    Choice,
    Client,
    Delivery,
    Delta,
    Event,
    Finished,
    InvalidRequest,
    Sampling,
)
from headway.v1 import inference_pb2 as pb
from tests.e2e.tiny_folder import write_tiny_folder
from tests.hop.support import SECRET, Engine, settled
from tests.hop.test_choices import kill
from tests.unit.metrics.scrape import fetch, samples
from tests.wire.live import live_gateway
from tests.wire.stack import request, stack
from tests.wire.test_logprobs import served
from tests.wire.wire_support import (
    Script,
    ScriptedSource,
    ScriptedStream,
    details_of,
    eventually,
    gateway,
    in_loop,
    loopback,
)

PROMPT = [3 + 7 * i % 90 for i in range(20)]
DRAWN = Sampling(max_tokens=40, temperature=1.0, ignore_eos=True, seed=11)


async def gather(events: AsyncIterator[Event]) -> dict[int, Choice]:
    """All choices of a stream, each checked for gaps and for one end."""
    ids: defaultdict[int, list[int]] = defaultdict(list)
    texts: defaultdict[int, list[str]] = defaultdict(list)
    scores: defaultdict[int, list[object]] = defaultdict(list)
    found: dict[int, Choice] = {}
    async for event in events:
        if isinstance(event, Delta):
            assert event.choice not in found, "more output after the end"
            assert event.first_index == len(ids[event.choice])
            ids[event.choice] += event.token_ids
            texts[event.choice].append(event.text)
            scores[event.choice] += event.logprobs
        elif isinstance(event, Finished):
            at = event.choice
            assert at not in found, "ended twice"
            whole = tuple(ids[at]), "".join(texts[at]), event, tuple(scores[at])
            found[at] = Choice(*whole)  # type: ignore[arg-type]
    return found


def alone(sampling: Sampling, choice: int) -> Sampling:
    """What asks for one choice as a request of its own."""
    assert sampling.seed is not None
    return dataclasses.replace(sampling, n=None, seed=choice_seed(sampling.seed, choice))


@in_loop
async def test_three_choices_are_three_calls_with_their_seeds(tokenizer: Tokenizer) -> None:
    engine = Engine("e0", num_blocks=256)
    async with stack(tokenizer, engine) as running, AsyncClient(running.address) as client:
        three = dataclasses.replace(DRAWN, n=3)
        whole = await client.complete(PROMPT, three)
        streamed = await gather(client.generate(PROMPT, three))
        solo = [await client.complete(PROMPT, alone(DRAWN, choice)) for choice in range(3)]
        await settled(engine)
        await eventually(lambda: running.board.metrics.calls == 0)
        router = samples(await asyncio.to_thread(fetch, running.board.address))
    assert whole.accepted.seed == 11
    assert len({choice.token_ids for choice in whole.choices}) == 3
    for number, choice in enumerate(whole.choices):
        assert choice.token_ids == solo[number].token_ids == streamed[number].token_ids
        assert choice.text == solo[number].text == streamed[number].text
        assert choice.finished.choice == number
        assert choice.finished.completion_tokens == 40
    # The prompt counts once in the sum over all choices, and so it does for the operator.
    assert [c.finished.prompt_tokens for c in whole.choices] == [20, 0, 0]
    assert whole.token_ids == whole.choices[0].token_ids
    assert router["headway_router_prompt_tokens_total",] == 5 * 20
    assert router["headway_router_output_tokens_total",] == 9 * 40
    assert router["headway_router_finished_total", "length"] == 9
    assert router["headway_router_ttft_seconds_count",] == 9
    assert router["headway_router_itl_seconds_count",] == 9 * 39
    for name in ("tpot", "longest_gap", "queue"):
        assert router[f"headway_router_{name}_seconds_count",] == 9
    assert router["headway_router_calls_total", "Complete", "OK"] == 4
    assert router["headway_router_calls_total", "Generate", "OK"] == 1


@in_loop
async def test_greedy_choices_are_alike(tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, Engine("e0")) as running, AsyncClient(running.address) as client:
        whole = await client.complete(PROMPT, Sampling(max_tokens=9, temperature=0.0, n=2))
    assert whole.choices[0].token_ids == whole.choices[1].token_ids


@pytest.mark.parametrize("n", [0, -1, 17, 1 << 40])
@in_loop
async def test_a_number_out_of_range_is_named_with_the_limit(tokenizer: Tokenizer, n: int) -> None:
    async with gateway(tokenizer, Script([70])) as wire, AsyncClient(wire.address) as client:
        with pytest.raises(InvalidRequest, match=rf"sampling\.n.*between 1 and 16, got {n}"):
            await client.complete("x", Sampling(n=n))
        assert not wire.source.opened


BAD_STARTS = [
    ([pb.Emitted(choice=2)], "emitted[0].choice"),
    ([pb.Emitted(choice=1), pb.Emitted(choice=1)], "emitted[1].choice"),
    ([pb.Emitted(choice=1, token_ids=[1, 512])], "emitted[0].token_ids[1]"),
    ([pb.Emitted(choice=1, token_ids=[1] * 5)], "emitted"),
]


@pytest.mark.parametrize(("emitted", "field"), BAD_STARTS)
@in_loop
async def test_a_bad_start_is_refused(
    tokenizer: Tokenizer, emitted: list[pb.Emitted], field: str
) -> None:
    sampling = pb.SamplingParams(n=2, seed=1, max_tokens=5)
    async with gateway(tokenizer, Script([70])) as wire:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await wire.inference.Complete(
                pb.GenerateRequest(text="x", sampling=sampling, emitted=emitted)
            )
        bad = details_of(refused.value)["BadRequest"]
        assert [v.field for v in bad.field_violations] == [field]  # type: ignore[attr-defined]
        assert not wire.source.opened


@in_loop
async def test_choices_go_on_after_what_was_delivered(tokenizer: Tokenizer) -> None:
    async with stack(tokenizer, Engine("e0", num_blocks=256)) as running:
        asked = request(1)
        asked.sampling.temperature, asked.sampling.n = 1.0, 3
        whole = await running.inference.Complete(asked)
        for choice, count in ((2, 0), (1, 15)):
            ids = whole.choices[choice].token_ids[:count]
            asked.emitted.append(pb.Emitted(choice=choice, token_ids=ids))
        rest = await running.inference.Complete(asked)
    assert [choice.finished.choice for choice in rest.choices] == [1, 2]
    assert rest.choices[0].token_ids == whole.choices[1].token_ids[15:]
    assert rest.choices[1].token_ids == whole.choices[2].token_ids
    assert [c.finished.usage.completion_tokens for c in rest.choices] == [40, 40]
    assert rest.accepted.seed == whole.accepted.seed


class OneFails(ScriptedSource):
    """Choice 1 fails after three tokens."""

    async def open(self, request: GenerationRequest) -> ScriptedStream:
        stream = await super().open(request)
        if request.choice == 1:
            error = SequenceFailed("NaN logits")
            stream._script = dataclasses.replace(self.script, error=error, error_after=3)
        return stream


@in_loop
async def test_one_choice_that_fails_ends_the_call_and_frees_the_others(
    tokenizer: Tokenizer,
) -> None:
    async with gateway(tokenizer, Script([70], step_s=0.01)) as wire:
        wire.source.__class__ = OneFails
        seen: Counter[int] = Counter()
        call = wire.inference.Generate(
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=3, max_tokens=100))
        )

        async def read() -> None:
            async for event in call:
                assert not event.HasField("finished")
                seen[event.delta.choice] += len(event.delta.token_ids)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert details_of(caught.value)["ErrorInfo"].reason == "SEQUENCE_FAILED"  # type: ignore[attr-defined]
        assert seen[1] == 3
        assert not wire.source.open_streams
        assert [stream.closed for stream in wire.source.opened] == [1, 1, 1]


@in_loop
async def test_a_cancelled_call_frees_every_choice(tokenizer: Tokenizer) -> None:
    engine = Engine("e0", step_s=0.01)
    async with stack(tokenizer, engine) as running:
        asked = request(1, max_tokens=200)
        asked.sampling.n = 4
        call = running.inference.Generate(asked)
        for _ in range(6):
            await call.read()
        assert running.dispatcher.active_streams == 4
        call.cancel()
        await eventually(lambda: running.dispatcher.active_streams == 0)
        await settled(engine)


@in_loop
async def test_choices_count_as_streams_and_are_refused_together(tokenizer: Tokenizer) -> None:
    engine = Engine("e0")
    settings = DispatcherSettings(max_streams=3)
    async with stack(tokenizer, engine, settings=settings) as running:
        asked = request(1)
        asked.sampling.n = 4
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.inference.Complete(asked)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert running.dispatcher.active_streams == 0
        asked.sampling.n = 3
        assert len((await running.inference.Complete(asked)).choices) == 3


FULL = Sampling(
    max_tokens=24,
    min_tokens=6,
    temperature=1.3,
    seed=5,
    stop=("a", "e", "\x00"),
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logprobs=2,
    prompt_logprobs=1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("lost", [False, True], ids=["undisturbed", "engine lost"])
def test_a_real_model_gives_each_choice_what_it_gives_alone(folder: Path, lost: bool) -> None:
    """Log-probabilities, penalties, stop strings and min_tokens are each choice's own."""

    async def scenario() -> None:
        async with served(folder, 2) as (client, services):
            solo = [await client.complete(PROMPT, alone(FULL, choice)) for choice in range(3)]
            prompt: list[object] = []

            async def events() -> AsyncIterator[Event]:
                gone = not lost
                async for event in client.generate(PROMPT, dataclasses.replace(FULL, n=3)):
                    if isinstance(event, Delta):
                        prompt.append((event.choice, event.prompt_logprobs))
                        if not gone:
                            gone = True
                            busy = next(s for s in services if s.loop.load.running)
                            await busy.stop("lost")
                    yield event

            found = await gather(events())
        for number, one in enumerate(solo):
            choice = found[number]
            assert (choice.token_ids, choice.text) == (one.token_ids, one.text)
            assert choice.finished.matched_stop == one.finished.matched_stop
            assert len(choice.token_ids) >= 6
            for mine, theirs in zip(choice.logprobs, one.logprobs, strict=True):
                assert mine.token_id == theirs.token_id
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert len({one.token_ids for one in solo}) == 3
        assert any(isinstance(one.finished.matched_stop, str) for one in solo)
        told = [(choice, scores) for choice, scores in prompt if scores]  # type: ignore[misc]
        assert [choice for choice, _ in told] == [0]
        assert len(told[0][1]) == len(PROMPT) - 1  # type: ignore[arg-type]

    asyncio.run(scenario())


@pytest.mark.parametrize("loss", ["router", "router and logs"])
@in_loop
async def test_the_client_goes_on_by_itself_after_its_router_is_lost(
    tokenizer: Tokenizer, loss: str
) -> None:
    """Another router answers at the same address; with no log left, the client's ids are enough."""
    engine = Engine("e0", num_blocks=256, step_s=0.01)
    asked = dataclasses.replace(DRAWN, max_tokens=120, n=3)
    async with contextlib.AsyncExitStack() as later, stack(tokenizer, engine) as running:
        port = int(running.address.rpartition(":")[2])
        client = await later.enter_async_context(AsyncClient(running.address))
        solo = [await client.complete(PROMPT, alone(asked, choice)) for choice in range(3)]

        async def events() -> AsyncIterator[Event]:
            left = 20
            delivery = Delivery(resume_window_s=20.0)
            async for event in client.generate(PROMPT, asked, delivery=delivery):
                yield event
                left -= 1
                if left == 0:
                    await replace_router()

        async def replace_router() -> None:
            await kill(running.dispatcher)
            if loss == "router and logs":
                await eventually(lambda: not engine.service._server._connections)
                engine.service._server._keeper._entries.clear()
                engine.service._server._keeper._by_key.clear()
            await running.server.stop(grace_s=0)
            second = Dispatcher(LinkSettings("router-1", SECRET))
            later.push_async_callback(second.close)
            await second.set_engines({("127.0.0.1", engine.port)})
            await eventually(lambda: bool(second.engines()))
            config = dataclasses.replace(loopback(), address=f"127.0.0.1:{port}")
            server = build_server(second, tokenizer, config)
            await server.start()
            later.push_async_callback(server.stop, grace_s=0)

        found = await gather(events())
        assert [found[n].token_ids for n in range(3)] == [one.token_ids for one in solo]
        assert [found[n].text for n in range(3)] == [one.text for one in solo]
        assert [found[n].finished.prompt_tokens for n in range(3)] == [20, 0, 0]


def test_a_blocking_client(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abcdefgh")
    text = tokenizer.decode(ids[:4])
    with live_gateway(tokenizer, Script(ids)) as wire, Client(wire.address) as client:
        three = Sampling(max_tokens=4, n=3)
        assert [choice.text for choice in client.complete("x", three).choices] == [text] * 3
        texts: defaultdict[int, str] = defaultdict(str)
        ends = []
        for event in client.generate("x", three):
            if isinstance(event, Delta):
                texts[event.choice] += event.text
            elif isinstance(event, Finished):
                ends.append(event.choice)
        assert dict(texts) == dict.fromkeys(range(3), text)
        assert sorted(ends) == [0, 1, 2]
        wire.source.open_error = Unavailable("no engine")
        with pytest.raises(Exception, match="no engine"):
            client.complete("x", three)
