"""Several outputs of one call: each is a log of its own; they come, stay and go together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.core.errors import InvalidRequest, Overloaded, ResumedElsewhere, UnknownResumeToken
from cluster.core.outcome import ResumedFrom
from cluster.core.policies import PolicyChoice
from cluster.core.sampling import choice_seed
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.router.kept import new_token, tokens_of
from cluster.router.stream import GenerationRequest, TokenStream
from tests.hop.support import (
    Engine,
    asyncio_timeout,
    expected,
    fleet,
    read_all,
    request,
    settled,
)
from tests.hop.test_dispatcher import run
from tests.hop.test_resume import _Deaf, read_some, rest, second_router


def call(
    number: int, n: int = 3, max_tokens: int = 60, window_s: float = 0.0, prompt_len: int = 10
) -> list[GenerationRequest]:
    """The choices of one call, sampled, with the seeds that the front door gives them."""
    base = request(number, max_tokens, prompt_len)
    drawn = replace(base.sampling, temperature=1.0)
    return [
        replace(
            base,
            sampling=replace(drawn, seed=choice_seed(drawn.seed, choice)),
            choice=choice,
            resume_window_s=window_s,
        )
        for choice in range(n)
    ]


def outputs(asked: list[GenerationRequest]) -> list[list[int]]:
    return [expected(one) for one in asked]


async def all_of(streams: list[TokenStream]) -> list[list[int]]:
    return list(await asyncio.gather(*map(read_all, streams)))


def test_every_choice_is_what_it_would_be_alone():
    async def scenario():
        async with fleet(Engine("a"), Engine("b")) as dispatcher:
            asked = call(1, n=5)
            assert len({tuple(ids) for ids in outputs(asked)}) == 5
            assert await all_of(await dispatcher.open_all(asked)) == outputs(asked)
            assert dispatcher.active_streams == 0

    run(scenario())


def test_choices_of_a_lost_engine_go_on_elsewhere():
    async def scenario():
        engines = Engine("a", step_s=0.005), Engine("b", step_s=0.005)
        async with fleet(*engines) as dispatcher:
            calls = [call(number, n=4) for number in range(3)]
            streams = [stream for one in calls for stream in await dispatcher.open_all(one)]
            reading = asyncio.create_task(all_of(streams))
            await asyncio.sleep(0.1)
            await engines[0].stop()
            assert await reading == [ids for one in calls for ids in outputs(one)]
            moved = [stream.timing.replays for stream in streams]
            assert 0 < sum(moved) < len(streams), "each has a way of its own"
            await settled(engines[1])

    run(scenario())


def test_preempted_choices_are_exact():
    async def scenario():
        engine = Engine("a", num_blocks=30, policies=PolicyChoice(reservation="prompt"))
        async with fleet(engine) as dispatcher:
            asked = call(1, n=12)
            assert await all_of(await dispatcher.open_all(asked)) == outputs(asked)
            assert engine.loop.load.preemptions > 0
            await settled(engine)

    run(scenario())


def test_choices_share_the_blocks_of_their_prompt():
    async def scenario():
        engine = Engine("a", num_blocks=400, policies=PolicyChoice(prefix_cache="on"))
        async with fleet(engine) as dispatcher:
            asked = call(1, n=8, max_tokens=20, prompt_len=200)
            assert await all_of(await dispatcher.open_all(asked)) == outputs(asked)
            counters = engine.loop._core.scheduler.counters
            assert counters.prefix_hit_tokens > 6 * 190, "the prompt was computed again"
            await settled(engine)

    run(scenario())


def test_a_call_is_refused_whole():
    """One of three finds no place: the two that had one give it back, at the engine too."""

    async def scenario():
        engine = Engine("a", num_blocks=20, step_s=0.01)
        gate = GateSettings(max_queued=1)
        settings = DispatcherSettings(max_streams=5, fleet=FleetSettings(gate=gate))
        async with fleet(engine, settings=settings) as dispatcher:
            large = call(1, n=4, max_tokens=30, prompt_len=37)
            with pytest.raises(Overloaded, match="limit is 1"):
                await dispatcher.open_all(large)
            assert dispatcher.active_streams == 0
            assert not dispatcher.fleet.waiting
            await settled(engine)
            with pytest.raises(Overloaded, match="0 streams are in flight and 6 more"):
                await dispatcher.open_all(call(1, n=6))
            kept = call(1, n=4, max_tokens=30, window_s=60.0, prompt_len=37)
            with pytest.raises(Overloaded):
                await dispatcher.open_all(kept)
            await settled(engine)
            assert len(engine.service._server._keeper) == 0
            # Nothing of it is left in the way of the next, once the router has heard so.
            await asyncio.sleep(0.4)
            asked = call(2, n=3)
            assert await all_of(await dispatcher.open_all(asked)) == outputs(asked)

    run(scenario())


def test_a_call_that_is_left_frees_all_choices():
    async def scenario():
        engine = Engine("a", num_blocks=256, step_s=0.02)
        async with fleet(engine) as dispatcher:
            streams = await dispatcher.open_all(call(1, max_tokens=200))
            for stream in streams:
                await read_some(stream, 1)
            for stream in streams:
                stream.leave()
            assert dispatcher.active_streams == 0
            await settled(engine)

    run(scenario())


def test_one_slow_reader_does_not_hold_up_the_other_choices():
    async def scenario():
        engine = Engine("a")
        async with fleet(engine, settings=DispatcherSettings(unread_limit=10)) as dispatcher:
            asked = call(1, n=2, max_tokens=150)
            slow, quick = await dispatcher.open_all(asked)
            assert await read_all(quick) == expected(asked[1])
            await asyncio.sleep(0.2)
            assert slow.stream.unread < 40
            assert await read_all(slow) == expected(asked[0])

    run(scenario())


@pytest.mark.parametrize("way", ["call", "router", "both alive"])
def test_one_token_resumes_every_choice_from_where_it_was(way):
    async def scenario():
        engines = [Engine("a", step_s=0.005), Engine("b", step_s=0.005)]
        async with fleet(*engines) as first:
            asked = call(1, n=4, window_s=5.0)
            asked[3] = replace(asked[3], sampling=replace(asked[3].sampling, max_tokens=3))
            streams = await first.open_all(asked)
            token = streams[0].resume_token
            assert {stream.resume_token for stream in streams} == {token}
            begun = [await read_some(streams[at], 3 * at + 1) for at in range(3)]
            assert await rest(streams[3], 0) == expected(asked[3])
            router = first
            if way != "call":
                router = await second_router(*engines)
            if way == "router":
                await kill(first)
            elif way == "call":
                for stream in streams:
                    stream.leave()
            await asyncio.sleep(0.1)
            # The fourth is finished, and its reader has seen that: it is not asked for.
            positions = {at: len(ids) for at, ids in enumerate(begun)}
            resumed = await router.resume_all(token, positions)
            assert [one.request.choice for one in resumed] == [0, 1, 2]
            rests = [rest(one.stream, positions[at]) for at, one in enumerate(resumed)]
            ends = await asyncio.gather(*rests)
            assert [a + b for a, b in zip(begun, ends, strict=True)] == outputs(asked)[:3]
            for one in resumed:
                one.stream.leave()
            origin = ResumedFrom.HERE if way == "call" else ResumedFrom.ENGINE
            assert router.counters.resumes[origin] == 3
            if way == "both alive":
                with pytest.raises(ResumedElsewhere):
                    await rest(streams[0], len(begun[0]))
                assert first.active_streams == 0
            if router is not first:
                await router.close()
            for engine in engines:
                await settled(engine)

    run(scenario())


async def kill(router: Dispatcher) -> None:
    """No word to the engines: their connections just end."""
    for link in router._links.values():
        link._listener = _Deaf()
        link.disconnect("killed by the test")


def test_no_position_at_all_wants_everything():
    async def scenario():
        async with fleet(Engine("a")) as dispatcher:
            asked = call(1, window_s=5.0)
            streams = await dispatcher.open_all(asked)
            await all_of(streams)
            resumed = await dispatcher.resume_all(streams[0].resume_token, {})
            assert await all_of([one.stream for one in resumed]) == outputs(asked)

    run(scenario())


def test_a_call_that_lacks_a_choice_is_not_resumed_and_what_was_found_is_freed():
    async def scenario():
        engine = Engine("a", num_blocks=256, step_s=0.02)
        async with fleet(engine) as first:
            streams = await first.open_all(call(1, max_tokens=200, window_s=60.0))
            for stream in streams:
                await read_some(stream, 1)
            await kill(first)
            second = await second_router(engine)
            token = streams[0].resume_token
            engine.service._server._keeper.forget(tokens_of(token)[1])
            with pytest.raises(UnknownResumeToken):
                await second.resume_all(token, {0: 0, 1: 0})
            assert second.active_streams == 0
            # One that nobody asked for, or from an impossible index, stays where it is.
            with pytest.raises(InvalidRequest, match=r"next_index of choice 2 .* between 0 and"):
                await second.resume_all(token, {2: 1000})
            resumed = await second.resume_all(token, {2: 0})
            assert len(resumed) == 1
            second.forget(token)
            await settled(engine)
            await second.close()

    run(scenario())


def test_what_was_taken_over_and_never_read_expires():
    async def scenario():
        engine = Engine("a", num_blocks=256, step_s=0.02)
        async with fleet(engine) as first:
            streams = await first.open_all(call(1, n=2, max_tokens=200, window_s=0.4))
            for stream in streams:
                await read_some(stream, 1)
            second = await second_router(engine)
            with pytest.raises(InvalidRequest):
                await second.resume_all(streams[0].resume_token, {0: 0, 1: 1000})
            assert second.active_streams == 2
            await asyncio.sleep(0.8)
            assert second.active_streams == 0
            await settled(engine)
            await second.close()

    run(scenario())


@pytest.mark.parametrize("max_tokens", [200, 2], ids=["running", "finished"])
def test_forgetting_forgets_every_choice(max_tokens):
    async def scenario():
        engine = Engine("a", num_blocks=256, step_s=0.02)
        async with fleet(engine) as dispatcher:
            streams = await dispatcher.open_all(call(1, max_tokens=max_tokens, window_s=60.0))
            for stream in streams:
                await read_some(stream, min(max_tokens, 5))
            assert len(engine.service._server._keeper) == 3
            dispatcher.forget(streams[0].resume_token)
            assert dispatcher.active_streams == 0
            await settled(engine)
            async with asyncio_timeout(5):
                while len(engine.service._server._keeper):
                    await asyncio.sleep(0.01)

    run(scenario())


@pytest.mark.parametrize("token", ["", ".", "x.", "x.0", "x.1g", "x.10000", "x.3.0", "y" * 5000])
def test_a_made_up_token_is_unknown_and_harms_nobody(token):
    async def scenario():
        async with fleet(Engine("a", step_s=0.005)) as dispatcher:
            asked = call(1)
            streams = await dispatcher.open_all(asked)
            dispatcher.forget(token)
            with pytest.raises(UnknownResumeToken):
                await dispatcher.resume_all(token, {})
            assert await all_of(streams) == outputs(asked)
            assert sum(stream.timing.replays for stream in streams) == 0, "the hop broke"

    run(scenario())


def test_a_choice_that_the_call_has_not_is_named():
    async def scenario():
        async with fleet(Engine("a")) as dispatcher:
            streams = await dispatcher.open_all(call(1, window_s=5.0)[1:])
            with pytest.raises(InvalidRequest, match=r"choice 0 is not one of .* 1, 2"):
                await dispatcher.resume_all(streams[0].resume_token, {0: 0})

    run(scenario())


def test_a_token_says_which_choices_there_are():
    assert list(tokens_of(new_token([0]))) == [0]
    for choices in ([0, 1], [1], [2, 5], list(range(16))):
        found = tokens_of(new_token(choices))
        assert list(found) == choices
        assert len(set(found.values())) == len(choices)
