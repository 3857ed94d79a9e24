"""An engine that plans the next step while one runs: the same tokens, whatever comes meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from cluster.core.invariants import check_idle
from cluster.core.policies import PolicyChoice
from tests.hop.support import (
    Engine,
    PacedLagging,
    asyncio_timeout,
    expected,
    fleet,
    read_all,
    request,
)

CHOICES = {
    "default": PolicyChoice(),
    "short of blocks": PolicyChoice(reservation="prompt", prefix_cache="on"),
    "itl": PolicyChoice(budget="itl"),
    "static": PolicyChoice("static", max_batch_wait_s=0.02),
}


@pytest.mark.parametrize("name", CHOICES)
def test_streams_are_those_of_serial_steps(name):
    async def scenario() -> None:
        engine = Engine("a", num_blocks=40, policies=CHOICES[name], executor_type=PacedLagging)
        async with fleet(engine) as dispatcher:
            requests = [request(n, max_tokens=5 + n, prompt_len=5 + n) for n in range(24)]
            streams = [await dispatcher.open(r) for r in requests]
            await asyncio.sleep(0.03)
            for stream in streams[::5]:
                stream.leave()
            kept = [(s, r) for i, (s, r) in enumerate(zip(streams, requests, strict=True)) if i % 5]
            outputs = await asyncio.gather(*(read_all(s) for s, _ in kept))
            assert outputs == [expected(r) for _, r in kept]
            assert engine.executor.deepest == 2
            async with asyncio_timeout(5):
                while engine.service.loop.load.blocks_free < 40:
                    await asyncio.sleep(0.01)
            assert engine.loop.failure is None
            check_idle(engine.service.loop._core.scheduler)

    asyncio.run(scenario())


def test_a_cancel_while_two_steps_are_under_way_frees_its_blocks():
    async def scenario() -> None:
        engine = Engine("a", step_s=0.05, executor_type=PacedLagging)
        async with fleet(engine) as dispatcher:
            lost = await dispatcher.open(request(1, max_tokens=60))
            kept_request = request(2, max_tokens=8)
            kept = await dispatcher.open(kept_request)
            await lost.next()
            lost.leave()
            assert await read_all(kept) == expected(kept_request)
            await asyncio.sleep(0.3)
            assert engine.loop.load.blocks_free == 64
            assert engine.loop.failure is None

    asyncio.run(scenario())
