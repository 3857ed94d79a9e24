"""Streams outlive their call and their router: kept, resumed, handed over, forgotten."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from cluster.core.errors import InvalidRequest, ResumedElsewhere, UnknownResumeToken
from cluster.core.outcome import DrainOrder, LossCause
from cluster.core.plan import TokenLogprob
from cluster.engine.core import Scores, StreamKey
from cluster.hop.keeper import LogKeeper
from cluster.hop.link import LinkSettings
from cluster.hop.messages import Keep, Submit
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.router.stream import GenerationRequest, TokenStream
from tests.hop.support import (
    SECRET,
    Engine,
    asyncio_timeout,
    expected,
    fleet,
    read_all,
    request,
    settled,
)
from tests.hop.test_dispatcher import run


def kept(number: int, window_s: float = 5.0, max_tokens: int = 60) -> GenerationRequest:
    return replace(
        request(number, max_tokens=max_tokens), resume_window_s=window_s, stop=("never",)
    )


async def read_some(stream: TokenStream, least: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < least:
        batch = await stream.next()
        ids += batch.token_ids
    return ids


async def rest(stream: TokenStream, first: int) -> list[int]:
    ids: list[int] = []
    while True:
        batch = await stream.next()
        assert batch.first_index == first + len(ids)
        ids += batch.token_ids
        if batch.finish is not None:
            return ids


async def second_router(*engines: Engine) -> Dispatcher:
    dispatcher = Dispatcher(LinkSettings("router-1", SECRET))
    await dispatcher.set_engines({("127.0.0.1", engine.port) for engine in engines})
    async with asyncio_timeout(5):
        while len(dispatcher.engines()) < len(engines):
            await asyncio.sleep(0.01)
    return dispatcher


@pytest.mark.parametrize("back", [0, 3])
def test_a_stream_goes_on_after_its_call_is_lost(back):
    async def scenario():
        engine = Engine("a", step_s=0.005)
        async with fleet(engine) as dispatcher:
            asked = kept(1)
            stream = await dispatcher.open(asked)
            ids = await read_some(stream, 10)
            stream.leave()
            await asyncio.sleep(0.1)
            resumed = await dispatcher.resume(stream.resume_token, len(ids) - back)
            assert list(resumed.request.emitted_ids) == ids[: len(ids) - back]
            assert resumed.request.stop == asked.stop
            ids = ids[: len(ids) - back]
            assert ids + await rest(resumed.stream, len(ids)) == expected(asked)
            resumed.stream.leave()
            await settled(engine)

    run(scenario())


def test_a_finished_stream_can_still_be_read_within_its_window():
    async def scenario():
        engine = Engine("a")
        async with fleet(engine) as dispatcher:
            asked = kept(2, window_s=0.5)
            stream = await dispatcher.open(asked)
            assert await read_all(stream) == expected(asked)
            again = await dispatcher.resume(stream.resume_token, 0)
            assert await rest(again.stream, 0) == expected(asked)
            again.stream.leave()
            await asyncio.sleep(0.8)
            with pytest.raises(UnknownResumeToken):
                await dispatcher.resume(stream.resume_token, 0)
            assert dispatcher.active_streams == 0

    run(scenario())


def test_a_stream_that_nobody_resumes_is_given_up_and_frees_everything():
    async def scenario():
        engine = Engine("a", step_s=0.02)
        async with fleet(engine) as dispatcher:
            stream = await dispatcher.open(kept(1, window_s=0.3, max_tokens=200))
            await read_some(stream, 1)
            stream.leave()
            assert dispatcher.active_streams == 1
            await asyncio.sleep(0.8)
            assert dispatcher.active_streams == 0
            await settled(engine)
            with pytest.raises(UnknownResumeToken):
                await dispatcher.resume(stream.resume_token, 0)

    run(scenario())


def test_forgetting_frees_at_once():
    async def scenario():
        engine = Engine("a", step_s=0.02)
        async with fleet(engine) as dispatcher:
            stream = await dispatcher.open(kept(1, window_s=60.0, max_tokens=200))
            await read_some(stream, 1)
            dispatcher.forget(stream.resume_token)
            dispatcher.forget(stream.resume_token)
            assert dispatcher.active_streams == 0
            await settled(engine)

    run(scenario())


def test_a_second_reader_takes_the_place_of_the_first():
    async def scenario():
        async with fleet(Engine("a", step_s=0.01)) as dispatcher:
            asked = kept(1)
            stream = await dispatcher.open(asked)
            waiting = asyncio.create_task(rest(stream, 0))
            await asyncio.sleep(0.05)
            resumed = await dispatcher.resume(stream.resume_token, 0)
            with pytest.raises(ResumedElsewhere):
                await waiting
            stream.leave()
            assert await rest(resumed.stream, 0) == expected(asked)

    run(scenario())


def test_an_index_beyond_the_log_is_refused_with_the_limit():
    async def scenario():
        async with fleet(Engine("a")) as dispatcher:
            stream = await dispatcher.open(kept(1, max_tokens=20))
            await read_all(stream)
            with pytest.raises(InvalidRequest, match=r"between 0 and 20.*got 21"):
                await dispatcher.resume(stream.resume_token, 21)
            with pytest.raises(UnknownResumeToken):
                await dispatcher.resume("made-up", 0)

    run(scenario())


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_another_router_goes_on_when_the_first_is_gone(way):
    """The engine that produced the stream has the log; nothing is lost with the router."""

    async def scenario():
        engines = [Engine("a", step_s=0.005), Engine("b", step_s=0.005)]
        async with fleet(*engines) as first:
            asked = [kept(n) for n in range(6)]
            streams = [await first.open(one) for one in asked]
            begun = [await read_some(stream, 5) for stream in streams]
            tokens = [stream.resume_token for stream in streams]
            second = await second_router(*engines)
            if way == "killed":
                # No word to the engines: their connections just end.
                for link in first._links.values():
                    link._listener = _Deaf()
                    link.disconnect("killed by the test")
            else:
                first.end_streams()
                await first.close()
            await asyncio.sleep(0.1)
            for token, ids, one in zip(tokens, begun, asked, strict=True):
                resumed = await second.resume(token, len(ids))
                assert resumed.request.request_id == one.request_id
                assert ids + await rest(resumed.stream, len(ids)) == expected(one)
                assert resumed.stream.timing.replays == 1
                resumed.stream.leave()
            await second.close()

    run(scenario())


def overtaken_copy(engine: Engine, stream: TokenStream, asked: GenerationRequest, ids: int) -> None:
    """As after the stream was moved away while the connection to this engine was down."""
    keep = Keep(stream.resume_token, 5.0, asked.request_id, list(asked.stop), "")
    prompt, emitted = list(asked.prompt_ids), expected(asked)[:ids]
    keeper = engine.service._server._keeper
    keeper.begin(StreamKey(99, 1), Submit(1, prompt, emitted, asked.sampling, keep=keep))
    keeper.lose(99)


@pytest.mark.parametrize("first", ["current", "overtaken"])
def test_of_two_copies_the_one_that_was_overtaken_is_not_used(first, monkeypatch):
    async def scenario():
        a, b = Engine("a", step_s=0.005), Engine("b", step_s=0.005)
        async with fleet(a, b) as dispatcher:
            asked = kept(1)
            stream = await dispatcher.open(asked)
            ids = await read_some(stream, 8)
            holder = next(e for e in (a, b) if e.name == stream.timing.engine_ids[0])
            other = a if holder is b else b
            overtaken_copy(other, stream, asked, ids=3)
            second = await second_router(a, b)
            slow = (other if first == "current" else holder).service._server
            at_once = slow._hand_over

            def late(connection, message):
                at_once(_Late(connection), message)

            monkeypatch.setattr(slow, "_hand_over", late)
            resumed = await second.resume(stream.resume_token, len(ids))
            assert ids + await rest(resumed.stream, len(ids)) == expected(asked)
            resumed.stream.leave()
            await second.close()

    run(scenario())


def test_a_client_that_has_more_than_any_copy_is_told_to_send_what_it_has():
    async def scenario():
        engine = Engine("a", step_s=0.005)
        async with fleet(engine) as dispatcher:
            asked = kept(1)
            stream = await dispatcher.open(asked)
            ids = await read_some(stream, 3)
            token = stream.resume_token
            # A copy here: this router was cut off, and the stream went on at another.
            with pytest.raises(UnknownResumeToken, match=r"before next_index 59; send the request"):
                await dispatcher.resume(token, 59)
            with pytest.raises(InvalidRequest, match="between 0 and 60, its max_tokens; got 61"):
                await dispatcher.resume(token, 61)
            assert (ids + await rest(stream, len(ids))) == expected(asked)
            dispatcher.forget(token)
            await asyncio.sleep(0.1)
            # A copy at an engine; whoever knew more is gone.
            overtaken_copy(engine, stream, asked, ids=10)
            with pytest.raises(UnknownResumeToken, match="ends at 10, before next_index 12"):
                await dispatcher.resume(token, 12)
            assert dispatcher.active_streams == 0
            await settled(engine)

    run(scenario())


class _Late:
    """An engine's connection to a router on which answers take their time."""

    def __init__(self, connection):
        self._connection = connection

    def send(self, message, now):
        asyncio.get_running_loop().call_later(0.2, self._connection.send, message, now)


class _Deaf:
    """A dead process hears nothing."""

    def on_up(self, link, welcome): ...

    def on_frame(self, link, frame): ...

    def on_adopted(self, link, message): ...

    def on_down(self, link, reason): ...


def test_a_client_that_comes_back_at_another_router_takes_its_stream_along():
    async def scenario():
        engine = Engine("a", step_s=0.01)
        async with fleet(engine) as first:
            asked = kept(3)
            stream = await first.open(asked)
            ids = await read_some(stream, 5)
            second = await second_router(engine)
            resumed = await second.resume(stream.resume_token, len(ids))
            assert ids + await rest(resumed.stream, len(ids)) == expected(asked)
            with pytest.raises(ResumedElsewhere):
                await rest(stream, len(ids))
            assert first.active_streams == 0
            await second.close()

    run(scenario())


def test_a_client_with_all_ids_needs_no_token():
    async def scenario():
        async with fleet(Engine("a")) as dispatcher:
            asked = request(5, max_tokens=40)
            whole = expected(asked)
            again = replace(asked, emitted_ids=tuple(whole[:15]))
            stream = await dispatcher.open(again)
            assert await rest(stream, 15) == whole[15:]

    run(scenario())


def test_kept_streams_survive_relief_and_engine_loss():
    async def scenario():
        a, b = Engine("a", step_s=0.01), Engine("b", step_s=0.01)
        async with fleet(a, b, settings=DispatcherSettings()) as dispatcher:
            asked = [kept(n) for n in range(4)]
            streams = [await dispatcher.open(one) for one in asked]
            begun = [await read_some(stream, 5) for stream in streams]
            for stream in streams:
                stream.leave()
            await a.stop()
            await asyncio.sleep(0.3)
            for stream, ids, one in zip(streams, begun, asked, strict=True):
                resumed = await dispatcher.resume(stream.resume_token, len(ids))
                assert ids + await rest(resumed.stream, len(ids)) == expected(one)

    run(scenario())


def test_the_keeper_holds_no_more_numbers_than_it_may():
    """Few logs may be as large as many: 65,536 allowed ids, long prompts, log-probabilities."""
    from cluster.hop import keeper as module

    it = LogKeeper()
    allowed = replace(request(1).sampling, allowed_token_ids=tuple(range(1 << 16)))
    most = module.MAX_NUMBERS // (1 << 16)
    for number in range(most + 10):
        keep = Keep(f"t{number}", 5.0, "r", [], "")
        it.begin(StreamKey(1, number), Submit(number, [1], [], allowed, keep=keep))
    assert most - 10 < len(it) < most
    # What is produced counts too, and the oldest go for it.
    before, newest = len(it), StreamKey(1, most + 9)
    score = TokenLogprob(7, -1.0, [(7, -1.0)] * 20)
    for _ in range(100):
        it.extend(newest, [7] * 4096, None, Scores([score] * 4096, []))
    assert len(it) == 1 < before
    assert it.adopt(f"t{most + 9}") is not None
    assert len(it) == it._numbers == 0


def test_the_keeper_is_bounded_and_expires():
    from cluster.hop import keeper as module

    now = [0.0]
    it = LogKeeper(lambda: now[0])
    for number in range(module.MAX_LOGS + 10):
        keep = Keep(f"t{number}", 5.0, "r", [], "")
        message = Submit(number + 1, [1], [], request(1).sampling, keep=keep)
        it.begin(StreamKey(1, number + 1), message)
    assert len(it) == module.MAX_LOGS
    it.lose(1)
    now[0] = 4.9
    assert it.adopt(f"t{module.MAX_LOGS}") is not None
    now[0] = 5.1
    it.expire()
    assert len(it) == 0


def test_drain_takes_nothing_new_and_finishes_what_there_is():
    async def scenario():
        a, b = Engine("a", step_s=0.01), Engine("b", step_s=0.01)
        async with fleet(a, b) as dispatcher:
            old = [await dispatcher.open(request(n)) for n in range(4)]
            assert dispatcher.drain("a", DrainOrder.FINISH) is not None
            assert dispatcher.drain("nobody", DrainOrder.FINISH) is None
            began = time.monotonic()
            while not any(e.draining for e in dispatcher.engines()):
                assert time.monotonic() - began < 2
                await asyncio.sleep(0.01)
            steps = a.loop.load.emitted_tokens
            new = [await dispatcher.open(request(n)) for n in range(4, 10)]
            assert all(s.timing.engine_ids == ["b"] for s in new)
            for number, stream in enumerate(old + new):
                assert await read_all(stream) == expected(request(number))
            assert a.loop.load.emitted_tokens > steps, "what it had was cut instead of finished"
            dispatcher.drain("a", DrainOrder.UNDO)
            await asyncio.sleep(0.3)
            more = [await dispatcher.open(request(n)) for n in range(4)]
            assert {s.timing.engine_ids[0] for s in more} == {"a", "b"}
            for stream in more:
                await read_all(stream)

    run(scenario())


def test_what_an_engine_has_goes_on_elsewhere_when_its_operator_wants_it_empty():
    """Of every router, without a token lost; and the engine stays, for when it is wanted again."""

    async def scenario():
        a, b = Engine("a", step_s=0.01), Engine("b", step_s=0.01)
        async with fleet(a, b) as first:
            second = await second_router(a, b)
            asked = [request(n, max_tokens=60) for n in range(8)]
            streams = [await (first, second)[n % 2].open(one) for n, one in enumerate(asked)]
            reading = [asyncio.create_task(read_all(stream)) for stream in streams]
            await asyncio.sleep(0.1)
            there = sum(stream.timing.engine_ids == ["a"] for stream in streams)
            assert there >= 2
            # At once: the order to drain and what comes of it arrive with the same frame.
            first.drain("a", DrainOrder.MOVE)
            await settled(a)
            for one, ids in zip(asked, await asyncio.gather(*reading), strict=True):
                assert ids == expected(one)
            moved = [s for s in streams if s.timing.engine_ids == ["a", "b"]]
            assert len(moved) == there
            assert all(stream.timing.replays == 1 for stream in moved)
            counted = [d.counters.replays[LossCause.EMPTIED] for d in (first, second)]
            assert sum(counted) == there
            assert min(counted) > 0, "one of the routers kept its streams there"
            first.drain("a", DrainOrder.UNDO)
            await asyncio.sleep(0.3)
            more = [await first.open(request(n)) for n in range(4)]
            assert {stream.timing.engine_ids[0] for stream in more} == {"a", "b"}
            for stream in more:
                await read_all(stream)
            await second.close()

    run(scenario())


def test_an_engine_that_is_scaled_in_finishes_its_streams_first():
    async def scenario():
        a, b = Engine("a", step_s=0.01), Engine("b", step_s=0.01)
        async with fleet(a, b) as dispatcher:
            streams = [await dispatcher.open(request(n)) for n in range(6)]
            await a.service.drain(grace_s=10.0)
            await a.stop()
            for number, stream in enumerate(streams):
                assert await read_all(stream) == expected(request(number))
                assert stream.timing.replays == 0, "it was cut though there was time"

    run(scenario())


def test_a_drain_that_takes_too_long_ends_in_replays():
    async def scenario():
        a, b = Engine("a", step_s=0.03), Engine("b", step_s=0.01)
        async with fleet(a, b) as dispatcher:
            streams = [await dispatcher.open(request(n, max_tokens=60)) for n in range(6)]
            await a.service.drain(grace_s=0.3)
            await a.stop()
            moved = 0
            for number, stream in enumerate(streams):
                assert await read_all(stream) == expected(request(number, max_tokens=60))
                moved += stream.timing.replays
            assert moved

    run(scenario())
