"""A tensor-parallel engine through Ray: ranks as actors, one of them killed in mid-stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headway.client import AsyncClient
from tests.e2e.app import App, headway
from tests.e2e.test_two_engines import generate, idle
from tests.e2e.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    command = headway(
        *("serve", "--model", str(folder), "--address", "{address}"),
        *("--engines", "2", "--tensor-parallel-size", "2"),
        *("--num-blocks", "120", "--dtype", "float32", "--max-num-batched-tokens", "64"),
    )
    app = App(command).start()
    yield app
    assert app.stop() == 0, app.lines
    assert app.survivors() == []


def ranks(app: App) -> list[psutil.Process]:
    return app.processes("ray::Rank")


def test_a_killed_rank_costs_its_streams_a_gap_and_no_token(app: App):
    async def scenario() -> None:
        async with AsyncClient(app.address) as client:
            solo = [await generate(client, n) for n in range(12)]
            assert len(ranks(app)) == 2, "one rank per engine beside its leader"
            together = [asyncio.create_task(generate(client, n)) for n in range(12)]
            await asyncio.sleep(0.3)
            victim = ranks(app)[0]
            victim.kill()
            began = time.monotonic()
            assert list(await asyncio.gather(*together)) == solo
            deadline = began + 60.0
            while len(ranks(app)) < 2 or len((await client.status()).engines) < 2:
                assert time.monotonic() < deadline, "the group was not replaced"
                await asyncio.sleep(0.2)
            assert victim.pid not in {p.pid for p in ranks(app)}
            assert [await generate(client, n) for n in range(12)] == solo
            await idle(client)

    asyncio.run(scenario())
