"""A long run with room for one (R46): queues are bounded, and afterwards every counter is back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from cluster.core.errors import Overloaded
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from tests.hop.support import Engine, expected, fleet, read_all, request, settled
from tests.hop.test_dispatcher import run

REQUESTS = 300
MAX_QUEUED = 8


async def client(dispatcher: Dispatcher, number: int, chooser: random.Random) -> str:
    """One request: read to its end, left in the middle, or refused at the door."""
    asked = request(number, max_tokens=chooser.randrange(1, 12))
    leaves = number % 4 == 3
    try:
        stream = await dispatcher.open(asked)
    except Overloaded:
        return "refused"
    if leaves:
        if number % 8 == 3:
            await stream.next()
        stream.leave()
        return "left"
    assert await read_all(stream) == expected(asked)
    return "read"


def test_nothing_is_left_behind_and_no_queue_grows_beyond_its_limit():
    async def scenario():
        engine = Engine("a", max_num_seqs=1, step_s=0.0005)
        settings = DispatcherSettings(fleet=FleetSettings(gate=GateSettings(max_queued=MAX_QUEUED)))
        async with fleet(engine, settings=settings) as dispatcher:
            chooser = random.Random(7)
            outcomes: Counter[str] = Counter()
            deepest = 0
            while outcomes.total() < REQUESTS:
                first, burst = outcomes.total(), chooser.randrange(1, 24)
                tasks = [
                    asyncio.create_task(client(dispatcher, n, chooser))
                    for n in range(first, first + burst)
                ]
                await asyncio.sleep(0)
                deepest = max(deepest, dispatcher.facts().queued)
                outcomes.update(await asyncio.gather(*tasks))
            assert min(outcomes[way] for way in ("read", "left", "refused")) > 20, outcomes
            assert 0 < deepest <= MAX_QUEUED
            await settled(engine)
            # The next frame tells the router so.
            await asyncio.sleep(0.5)
            facts = dispatcher.facts()
            assert (facts.streams, facts.queued, facts.queued_tokens) == (0, 0, 0)
            assert dispatcher.demand().queued == 0
            (snapshot,) = dispatcher.fleet.engines
            assert (snapshot.streams, snapshot.waiting_tokens, snapshot.kv_use) == (0, 0, 0.0)
            assert not dispatcher._of_job
            (connected,) = dispatcher._engines
            assert not connected.streams
            again = request(1)
            assert await read_all(await dispatcher.open(again)) == expected(again)

    run(scenario())
