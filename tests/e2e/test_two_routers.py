"""Two routers on one address and two engines, through Ray: a router killed in mid-stream, an engine
drained, the coordinator killed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.client import AsyncClient, Delivery, Delta, Finished
from tests.e2e.app import App, headway
from tests.e2e.reading import UnderWay, engine_ids, prompt, reference, sampling
from tests.e2e.tiny_folder import write_tiny_folder
from tests.tcp import connections_at

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

ROUTER, COORDINATOR = "ray::ServeReplica:headway:Router", "ray::Coordinator"
STREAMS = 16
CALLS = 6
"""With several outputs each."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder: Path = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny", max_len=2048)
    command = headway(
        *("serve", "--model", str(folder), "--address", "{address}"),
        *("--engines", "2", "--routers", "2"),
        *("--num-blocks", "1500", "--dtype", "float32", "--max-num-batched-tokens", "64"),
    )
    app = App(command).start()
    yield app
    assert app.stop() == 0, app.lines
    assert app.survivors() == []


async def choices(address: str, number: int) -> list[list[int]]:
    """Three outputs of one call, on a channel of its own."""
    ids: list[list[int]] = [[], [], []]
    asked = dataclasses.replace(sampling(number), temperature=1.0, n=3)
    async with AsyncClient(address) as client:
        delivery = Delivery(resume_window_s=60.0)
        async for event in client.generate(prompt(number), asked, delivery=delivery):
            if isinstance(event, Delta):
                assert event.first_index == len(ids[event.choice])
                ids[event.choice] += event.token_ids
            elif isinstance(event, Finished):
                assert event.completion_tokens == len(ids[event.choice])
    return ids


def test_a_killed_router_costs_its_streams_a_gap_and_no_token(app: App) -> None:
    async def scenario() -> None:
        expected = await reference(app.address)
        several = [await choices(app.address, n) for n in range(CALLS)]
        routers = app.processes(ROUTER)
        assert len(routers) == 2
        streams = UnderWay(app.address, STREAMS)
        await streams.begun()
        calls = [asyncio.create_task(choices(app.address, n)) for n in range(CALLS)]
        await asyncio.sleep(0.1)
        # Each of the streams has a connection, and the kernel deals them out.
        victim = max(routers, key=lambda router: connections_at(app.address, router))
        assert connections_at(app.address, victim) >= STREAMS // 2
        assert not any(call.done() for call in calls)
        victim.kill()
        await streams.ended(expected)
        assert list(await asyncio.gather(*calls)) == several
        app.until_replaced(victim, ROUTER)
        await UnderWay(app.address, STREAMS).ended(expected)

    asyncio.run(scenario())


def test_a_drained_engine_finishes_and_gets_nothing_new(app: App) -> None:
    async def scenario() -> None:
        expected = await reference(app.address)
        async with AsyncClient(app.address) as client:

            async def steps() -> dict[str, int]:
                return {e.engine_id: e.step for e in (await client.status()).engines}

            victim = (await client.status()).engines[0].engine_id
            streams = UnderWay(app.address, STREAMS)
            await streams.begun()
            assert await client.drain(victim) > 0, "it had no stream to finish"
            done = await streams.ended(expected)
            assert any(victim in seen.engines for seen in done)
            assert not any(seen.replays for seen in done), "drained, not emptied"
            while await client.drain(victim):
                await asyncio.sleep(0.05)
            before = await steps()
            await UnderWay(app.address, STREAMS).ended(expected)
            after = await steps()
            assert after[victim] == before[victim]
            await client.drain(victim, undo=True)
            await asyncio.sleep(0.5)
            again = await UnderWay(app.address, STREAMS).ended(expected)
            assert any(victim in seen.engines for seen in again)

    asyncio.run(scenario())


def test_without_the_coordinator_streams_go_on_and_it_comes_back(app: App) -> None:
    async def scenario() -> None:
        expected = await reference(app.address)
        (coordinator,) = app.processes(COORDINATOR)
        streams = UnderWay(app.address, STREAMS)
        await streams.begun()
        coordinator.kill()
        await streams.ended(expected)
        app.until_replaced(coordinator, COORDINATOR, within_s=30.0)
        async with AsyncClient(app.address) as client:
            await asyncio.sleep(2.0)
            assert len(await engine_ids(client)) == 2
        await UnderWay(app.address, STREAMS).ended(expected)

    asyncio.run(scenario())
