"""Two routers on one address and two engines, through Ray: a router killed in mid-stream, an engine
drained, the coordinator killed."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.client import AsyncClient, Delivery, Delta, Finished
from tests.e2e.app import App, headway
from tests.e2e.test_two_engines import generate, prompt, sampling
from tests.e2e.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

STREAMS = 16
CALLS = 6
"""With several outputs each."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder: Path = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    command = headway(
        *("serve", "--model", str(folder), "--address", "{address}"),
        *("--engines", "2", "--routers", "2"),
        *("--num-blocks", "120", "--dtype", "float32", "--max-num-batched-tokens", "64"),
    )
    app = App(command).start()
    yield app
    assert app.stop() == 0, app.lines
    assert app.survivors() == []


async def resumable(address: str, number: int) -> list[int]:
    """On a channel of its own: the kernel deals connections out to the routers."""
    ids: list[int] = []
    async with AsyncClient(address) as client:
        delivery = Delivery(resume_window_s=60.0)
        async for event in client.generate(prompt(number), sampling(number), delivery=delivery):
            if isinstance(event, Delta):
                assert event.first_index == len(ids)
                ids += event.token_ids
            elif isinstance(event, Finished):
                assert event.completion_tokens == len(ids)
    return ids


async def choices(address: str, number: int) -> list[list[int]]:
    """The same with three outputs of one call."""
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


async def solo(app: App) -> list[list[int]]:
    async with AsyncClient(app.address) as client:
        return [await generate(client, n) for n in range(STREAMS)]


def test_a_killed_router_costs_its_streams_a_gap_and_no_token(app: App) -> None:
    async def scenario() -> None:
        expected = await solo(app)
        several = [await choices(app.address, n) for n in range(CALLS)]
        routers = app.replicas("Router")
        assert len(routers) == 2
        streams = [asyncio.create_task(resumable(app.address, n)) for n in range(STREAMS)]
        calls = [asyncio.create_task(choices(app.address, n)) for n in range(CALLS)]
        await asyncio.sleep(0.3)
        routers[0].kill()
        assert list(await asyncio.gather(*streams)) == expected
        assert list(await asyncio.gather(*calls)) == several
        deadline = time.monotonic() + 60.0
        while len([p for p in app.replicas("Router") if p.is_running()]) < 2:
            assert time.monotonic() < deadline, "Serve did not replace the router"
            await asyncio.sleep(0.3)
        assert await solo(app) == expected

    asyncio.run(scenario())


def test_a_drained_engine_finishes_and_gets_nothing_new(app: App) -> None:
    async def scenario() -> None:
        expected = await solo(app)
        async with AsyncClient(app.address) as client:
            victim = (await client.status()).engines[0].engine_id
            streams = [asyncio.create_task(resumable(app.address, n)) for n in range(STREAMS)]
            await asyncio.sleep(0.1)
            await client.drain(victim)
            assert list(await asyncio.gather(*streams)) == expected
            while await client.drain(victim):
                await asyncio.sleep(0.05)
            before = {e.engine_id: e.step for e in (await client.status()).engines}
            assert await solo(app) == expected
            after = {e.engine_id: e.step for e in (await client.status()).engines}
            assert after[victim] == before[victim]
            await client.drain(victim, undo=True)
            await asyncio.sleep(0.5)
            together = [asyncio.create_task(resumable(app.address, n)) for n in range(STREAMS)]
            assert list(await asyncio.gather(*together)) == expected
            again = {e.engine_id: e.step for e in (await client.status()).engines}
            assert again[victim] > after[victim]

    asyncio.run(scenario())


def test_without_the_coordinator_streams_go_on_and_it_comes_back(app: App) -> None:
    async def scenario() -> None:
        expected = await solo(app)
        coordinators = app.processes("ray::Coordinator")
        assert len(coordinators) == 1
        streams = [asyncio.create_task(resumable(app.address, n)) for n in range(STREAMS)]
        await asyncio.sleep(0.1)
        coordinators[0].kill()
        assert list(await asyncio.gather(*streams)) == expected
        deadline = time.monotonic() + 30.0
        while all(p.pid == coordinators[0].pid for p in app.processes("ray::Coordinator")):
            assert time.monotonic() < deadline, "nobody started a coordinator again"
            await asyncio.sleep(0.3)
        async with AsyncClient(app.address) as client:
            await asyncio.sleep(2.0)
            assert len((await client.status()).engines) == 2
        assert await solo(app) == expected

    asyncio.run(scenario())
