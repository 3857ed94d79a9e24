"""A tensor-parallel engine through Ray: ranks as actors, one of them killed in mid-stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headway.client import AsyncClient
from tests.e2e.app import App, headway
from tests.e2e.reading import UnderWay, engine_ids, reference, until_replaced
from tests.e2e.test_two_engines import idle
from tests.e2e.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

RANK = "ray::Rank"
STREAMS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny", max_len=2048)


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    command = headway(
        *("serve", "--model", str(folder), "--address", "{address}"),
        *("--engines", "2", "--tensor-parallel-size", "2"),
        *("--num-blocks", "1500", "--dtype", "float32", "--max-num-batched-tokens", "64"),
    )
    app = App(command).start()
    yield app
    assert app.stop() == 0, app.lines
    assert app.survivors() == []


def ranks(app: App) -> list[psutil.Process]:
    return app.processes(RANK)


def test_a_killed_rank_costs_its_streams_a_gap_and_no_token(app: App):
    async def scenario() -> None:
        expected = await reference(app.address)
        async with AsyncClient(app.address) as client:
            engines = await engine_ids(client)
            assert len(ranks(app)) == 2, "one rank per engine beside its leader"
            streams = UnderWay(app.address, STREAMS)
            await streams.begun()
            victim = ranks(app)[0]
            victim.kill()
            assert any(seen.replays for seen in await streams.ended(expected))
            app.until_replaced(victim, RANK)
            await until_replaced(client, engines)
            assert len(ranks(app)) == 2
            await UnderWay(app.address, STREAMS).ended(expected)
            await idle(client)

    asyncio.run(scenario())
