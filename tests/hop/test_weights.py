"""New weights beside old ones, over real engines: streams stay with theirs as long as they can."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster.core.modelinfo import ModelInfo
from cluster.hop.link import LinkSettings
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from tests.hop.support import SECRET, Engine, PacedExecutor, expected, fleet, read_all, request
from tests.hop.test_dispatcher import run


def executor_of(**facts: object) -> type[PacedExecutor]:
    """A shadow executor that says something else of its model."""

    class Other(PacedExecutor):
        @property
        def info(self) -> ModelInfo:
            return replace(self._info, **facts)  # type: ignore[arg-type]

    return Other


def engine(name: str, **facts: object) -> Engine:
    return Engine(name, step_s=0.003, executor_type=executor_of(**facts))


def test_streams_stay_with_their_weights_until_the_last_engine_that_has_them_goes():
    async def scenario():
        old = [engine(f"old-{n}", fingerprint="v1") for n in range(2)]
        new = engine("new", fingerprint="v2")
        async with fleet(*old) as dispatcher:
            asked = [request(n, max_tokens=120) for n in range(8)]
            streams = [await dispatcher.open(one) for one in asked]
            readers = [asyncio.create_task(read_all(stream)) for stream in streams]
            await asyncio.sleep(0.1)
            addresses = {("127.0.0.1", e.port) for e in old}
            await dispatcher.set_engines(addresses | {await new.start()})
            while len(dispatcher.engines()) < 3:
                await asyncio.sleep(0.01)
            await old[0].stop()
            await asyncio.sleep(0.1)
            visited = {name for stream in streams for name in stream.timing.engine_ids}
            assert visited == {"old-0", "old-1"}, "a stream changed its weights without need"
            assert any(stream.timing.replays for stream in streams)
            await old[1].stop()
            assert await asyncio.gather(*readers) == [expected(one) for one in asked]
            assert all(stream.timing.engine_ids[-1] == "new" for stream in streams)
            await new.stop()

    run(scenario())


def test_an_engine_with_another_tokenizer_is_not_taken():
    async def scenario():
        settings = DispatcherSettings(tokenizer="ours")
        right, wrong = engine("right", tokenizer="ours"), engine("wrong", tokenizer="theirs")
        dispatcher = Dispatcher(LinkSettings("router-0", SECRET), settings)
        await dispatcher.set_engines({await right.start(), await wrong.start()})
        await asyncio.sleep(0.5)
        assert [status.engine_id for status in dispatcher.engines()] == ["right"]
        await dispatcher.close()
        for one in (right, wrong):
            await one.stop()

    run(scenario())


def test_an_engine_with_another_vocabulary_is_not_taken_beside_the_others():
    async def scenario():
        small, large = engine("small"), engine("large", vocab_size=500)
        async with fleet(small) as dispatcher:
            await dispatcher.set_engines({("127.0.0.1", small.port), await large.start()})
            await asyncio.sleep(0.5)
            assert [status.engine_id for status in dispatcher.engines()] == ["small"]
            await large.stop()

    run(scenario())
