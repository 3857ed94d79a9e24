"""Cluster-wide preemption over real engines: who loses its blocks goes on where there are some."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster.core.policies import PolicyChoice
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.relief import ReliefSettings
from cluster.hop.link import LinkSettings
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from tests.hop.support import SECRET, Engine, asyncio_timeout, expected, read_all, request, settled
from tests.hop.test_dispatcher import run

ON_DEMAND = PolicyChoice(reservation="on-demand")


async def crowd(max_moves: int) -> tuple[Dispatcher, list[Engine], int]:
    """Ten long streams on a small engine that is alone; then a large one comes up. Returns how
    often streams were preempted."""
    small = Engine("small", num_blocks=75, step_s=0.004, policies=ON_DEMAND)
    large = Engine("large", num_blocks=400, step_s=0.004, policies=ON_DEMAND)
    settings = DispatcherSettings(fleet=FleetSettings(relief=ReliefSettings(max_moves=max_moves)))
    dispatcher = Dispatcher(LinkSettings("router-0", SECRET), settings)
    first = await small.start()
    await dispatcher.set_engines({first})
    async with asyncio_timeout(5):
        while not dispatcher.engines():
            await asyncio.sleep(0.01)
    asked = [request(n, max_tokens=80) for n in range(10)]
    streams = [await dispatcher.open(one) for one in asked]
    await asyncio.sleep(0.05)
    await dispatcher.set_engines({first, await large.start()})
    outputs = await asyncio.gather(*(read_all(stream) for stream in streams))
    assert outputs == [expected(one) for one in asked]
    for engine in (small, large):
        await settled(engine)
    return dispatcher, [small, large], sum(s.timing.preemptions for s in streams)


def test_victims_go_on_at_the_engine_with_room_and_keep_their_tokens():
    async def scenario():
        dispatcher, engines, preemptions = await crowd(max_moves=3)
        assert preemptions
        assert dispatcher.facts().relief_moves > 0
        assert engines[1].loop.load.emitted_tokens > 0
        await dispatcher.close()
        for engine in engines:
            await engine.stop()

    run(scenario())


def test_without_moves_they_wait_at_home():
    async def scenario():
        dispatcher, engines, _ = await crowd(max_moves=0)
        assert dispatcher.facts().relief_moves == 0
        await dispatcher.close()
        for engine in engines:
            await engine.stop()

    run(scenario())


def test_a_high_priority_request_gets_in_on_a_full_fleet():
    async def scenario():
        policies = PolicyChoice(reservation="on-demand", queue="priority")
        engines = [Engine(n, num_blocks=40, step_s=0.01, policies=policies) for n in "ab"]
        dispatcher = Dispatcher(LinkSettings("router-0", SECRET))
        addresses = {await engine.start() for engine in engines}
        await dispatcher.set_engines(addresses)
        async with asyncio_timeout(5):
            while len(dispatcher.engines()) < 2:
                await asyncio.sleep(0.01)
        low = [request(n, max_tokens=60, prompt_len=40) for n in range(12)]
        streams = [await dispatcher.open(one) for one in low]
        reading = [asyncio.create_task(read_all(stream)) for stream in streams]
        async with asyncio_timeout(10):
            while not dispatcher.facts().queued:
                await asyncio.sleep(0.01)
        urgent = replace(request(50, max_tokens=10, prompt_len=40), priority=9)
        stream = await dispatcher.open(urgent)
        assert await asyncio.wait_for(read_all(stream), 20.0) == expected(urgent)
        assert not all(task.done() for task in reading), "it did not go before anybody"
        assert await asyncio.gather(*reading) == [expected(one) for one in low]
        await dispatcher.close()
        for engine in engines:
            await engine.stop()

    run(scenario())
