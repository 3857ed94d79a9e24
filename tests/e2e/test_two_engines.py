"""Two engines behind one router, for real: Ray Serve, TCP hop, gRPC, separate processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.client import AsyncClient, Delta, Finished, Sampling
from headway.errors import RetryableError
from tests.e2e import reading
from tests.e2e.app import App, headway
from tests.e2e.reading import prompt
from tests.e2e.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder: Path = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny", max_len=2048)
    command = headway(
        *("serve", "--model", str(folder), "--address", "{address}", "--engines", "2"),
        *("--num-blocks", "1500", "--dtype", "float32", "--max-num-batched-tokens", "64"),
    )
    app = App(command).start()
    yield app
    assert app.stop() == 0, app.lines
    assert app.survivors() == []


LONG = 1800
"""Tokens: a second or more of steps, and little less than an engine has blocks for."""


def sampling(number: int) -> Sampling:
    return Sampling(
        max_tokens=1 + (number * 7) % 90,
        temperature=0.0 if number % 2 else 1.0,
        seed=number,
        ignore_eos=True,
    )


async def generate(client: AsyncClient, number: int) -> list[int]:
    ids: list[int] = []
    finished = 0
    async for event in client.generate(prompt(number), sampling(number)):
        if isinstance(event, Delta):
            assert event.first_index == len(ids)
            ids.extend(event.token_ids)
        elif isinstance(event, Finished):
            finished += 1
            assert event.completion_tokens == len(ids)
    assert finished == 1
    return ids


async def idle(client: AsyncClient, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = await client.status()
        if all(
            e.running == e.waiting == 0 and e.blocks_free == e.blocks_total for e in status.engines
        ):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not idle: {status}")


def test_concurrent_streams_equal_their_solo_runs(app: App):
    async def scenario() -> None:
        async with AsyncClient(app.address) as client:
            solo = [await generate(client, n) for n in range(32)]
            assert [len(ids) for ids in solo] == [sampling(n).max_tokens for n in range(32)]
            together = await asyncio.gather(*(generate(client, n) for n in range(32)))
            assert list(together) == solo
            await idle(client)
            status = await client.status()
            assert len(status.engines) == 2
            assert all(e.step > 0 for e in status.engines), "one engine never worked"

    asyncio.run(scenario())


def test_a_cancelled_stream_frees_its_blocks_at_once(app: App):
    async def scenario() -> None:
        async with AsyncClient(app.address) as client:
            await idle(client)
            events = client.generate(prompt(1), Sampling(max_tokens=LONG, ignore_eos=True))
            async for event in events:
                if isinstance(event, Delta):
                    break
            status = await client.status()
            (busy,) = [e for e in status.engines if e.running]
            await events.aclose()
            await idle(client)
            status = await client.status()
            (after,) = [e for e in status.engines if e.engine_id == busy.engine_id]
            assert after.step - busy.step < LONG // 4, "it went on as if somebody read it"

    asyncio.run(scenario())


def test_streams_survive_the_death_of_an_engine(app: App):
    async def scenario() -> None:
        expected = await reading.reference(app.address)
        async with AsyncClient(app.address) as client:
            engines = await reading.engine_ids(client)
            victim = app.replicas("Engine")[0]
            streams = reading.UnderWay(app.address, 24)
            await streams.begun()
            victim.kill()
            assert any(seen.replays for seen in await streams.ended(expected))
            await reading.until_replaced(client, engines)
            await reading.UnderWay(app.address, 24).ended(expected)
            await idle(client)
            (gone,), (come,) = engines - (now := await reading.engine_ids(client)), now - engines
        app.wait_for(f"{gone} is gone; ", 10.0)
        app.wait_for(f"{come} is up; ", 10.0)

    asyncio.run(scenario())


def test_sigterm_stops_in_order_and_tells_the_streams(tmp_path: Path):
    """What systemd, docker stop and Kubernetes send. The stream gets a reason, not a cut line."""
    folder = write_tiny_folder(tmp_path / "tiny", max_len=1 << 16)
    command = headway(
        *("serve", "--model", str(folder), "--address", "127.0.0.1:0", "--num-blocks", "6000")
    )
    app = App(command).start()
    (ready,) = [line for line in app.lines if "ready: tiny on" in line]
    address = ready.split(" on ")[1].split()[0]
    assert not address.endswith(":0"), "the port that was taken is not told"

    async def scenario() -> RetryableError:
        async with AsyncClient(address) as client:
            events = client.generate([5, 6, 7], Sampling(max_tokens=60_000, ignore_eos=True))
            async for event in events:
                if isinstance(event, Delta):
                    break
            os.kill(app.process.pid, signal.SIGTERM)
            with pytest.raises(RetryableError) as ended:
                [_ async for _ in events]
            return ended.value

    ended = asyncio.run(scenario())
    assert "shutting down" in str(ended)
    assert app.process.wait(60) == 0, app.lines
    assert any("stopped" in line for line in app.lines)
    assert app.survivors() == []
