"""Three Ray nodes with a router and an engine each: more engines, new weights, a dead node, and
engines that come and go with the work. Streams are read all the while, and none may fail."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway.client import AsyncClient
from tests.e2e import reading
from tests.e2e.app import free_port
from tests.e2e.ray_nodes import ENGINE, ROUTER, RayNodes
from tests.e2e.reading import Read, keep_reading, read, sampling
from tests.e2e.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CONTEXT = 2048
READERS = 12


@dataclass
class Site:
    """The cluster, its front door, and the two models that it may be given."""

    nodes: RayNodes
    old: Path
    new: Path

    def __post_init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"

    def deploy(self, *more: str, model: Path | None = None) -> str:
        command = (
            *("deploy", "--model", str(model or self.old), "--address", self.address),
            *("--routers-per-node", "1", "--dtype", "float32", "--num-blocks", "400"),
            *("--engine-drain", "2", "--router-drain", "20"),
        )
        done: subprocess.CompletedProcess[str] = self.nodes.headway(*command, *more)
        return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("models")
    old = write_tiny_folder(folder / "old", seed=0, max_len=CONTEXT)
    new = write_tiny_folder(folder / "new", seed=1, max_len=CONTEXT)
    with RayNodes(3) as nodes:
        site = Site(nodes, old, new)
        said = site.deploy("--engines", "3")
        assert "deploying 3 router(s), 3 engine(s)" in said
        assert "ready:" in said
        yield site
        nodes.headway("undeploy")
        assert site.nodes.pids(ENGINE) | site.nodes.pids(ROUTER) == set()


@asynccontextmanager
async def readers(site: Site) -> AsyncIterator[list[Read]]:
    """Streams one after the other, on twelve connections, until the block is left; then all that
    were read are in the list."""
    done: list[Read] = []
    stop = asyncio.Event()

    tasks = [
        asyncio.create_task(keep_reading([site.address], worker, READERS, stop, done))
        for worker in range(READERS)
    ]
    await asyncio.sleep(1.0)
    try:
        yield done
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def reference(site: Site) -> list[list[int]]:
    """Every request alone."""
    seen = await reading.reference(site.address)
    assert failures(seen) == []
    return [one.ids for one in seen]


async def until(holds: Callable[[], bool], what: str, within_s: float = 90.0) -> float:
    began = time.monotonic()
    while not await asyncio.to_thread(holds):
        assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.3)
    return time.monotonic() - began


def failures(done: list[Read]) -> list[str]:
    return [f"request {seen.number}: {seen.failure}" for seen in done if seen.failure]


def test_another_number_of_engines_touches_nobody_else(site: Site) -> None:
    async def scenario() -> None:
        expected = await reference(site)
        engines, routers = site.nodes.pids(ENGINE), site.nodes.pids(ROUTER)
        assert (len(engines), len(routers)) == (3, 3)
        async with readers(site) as done:
            await asyncio.to_thread(site.deploy, "--engines", "4")
            assert engines < site.nodes.pids(ENGINE)
            assert site.nodes.pids(ROUTER) == routers
            await asyncio.to_thread(site.deploy, "--engines", "3")
        assert failures(done) == []
        assert all(seen.ids == expected[seen.number] for seen in done)
        assert len(done) > READERS

    asyncio.run(scenario())


def test_new_weights_come_in_engine_by_engine_without_a_failed_stream(site: Site) -> None:
    async def scenario() -> None:
        before = await reference(site)
        engines, routers = site.nodes.pids(ENGINE), site.nodes.pids(ROUTER)
        async with readers(site) as done:
            began = time.monotonic()
            await asyncio.to_thread(site.deploy, "--engines", "3", model=site.new)
            print(f"rolled out in {time.monotonic() - began:.0f} s under {READERS} streams")
        assert site.nodes.pids(ENGINE) & engines == set()
        assert site.nodes.pids(ROUTER) & routers == set()
        after = await reference(site)
        assert all(old != new for old, new in zip(before, after, strict=True))
        assert failures(done) == []
        # A stream that began with the old weights keeps them as long as anybody has them; one that
        # outlives them all goes on with the new ones, which is the only thing left to do.
        kinds = [
            "old" if seen.ids == before[seen.number] else
            "new" if seen.ids == after[seen.number] else
            "both"
            for seen in done
        ]  # fmt: skip
        print({kind: kinds.count(kind) for kind in ("old", "new", "both")})
        assert kinds.count("old")
        assert all(
            len(seen.ids) == sampling(seen.number).max_tokens
            for seen, kind in zip(done, kinds, strict=True)
            if kind == "both"
        )
        assert kinds.count("both") <= READERS

    asyncio.run(scenario())


def test_a_dead_node_costs_its_streams_a_gap_and_no_token(site: Site) -> None:
    async def scenario() -> None:
        expected = await reference(site)
        victim = next(
            node
            for node in site.nodes.raylets[1:]
            if node in {site.nodes.node_of(pid) for pid in site.nodes.pids(ENGINE)}
        )
        async with readers(site) as done:
            died = await asyncio.to_thread(site.nodes.kill, victim)
            lost = len(died)
            print(f"killed a node: {lost} processes")
            # Serve starts on the nodes that are left what was on the one that is gone.
            took = await until(lambda: len(site.nodes.pids(ENGINE)) == 3, "three engines again")
            print(f"three engines again after {took:.0f} s")
            await asyncio.sleep(2.0)
        assert failures(done) == []
        assert all(seen.ids == expected[seen.number] for seen in done)
        worst = max(seen.longest_gap_s for seen in done)
        print(f"{len(done)} streams, the longest gap {worst:.2f} s")
        assert len(died) > 1
        await asyncio.to_thread(site.nodes.add)
        await until(lambda: len(site.nodes.pids(ROUTER)) == 3, "a router on the new node")
        assert await reference(site) == expected

    asyncio.run(scenario())


def test_engines_come_with_the_work_and_go_without_it(site: Site) -> None:
    """From none, with streams that wait for the first (R45)."""

    async def scenario() -> None:
        scaling = (
            *("--engines", "1", "--max-engines", "3", "--min-engines", "0"),
            *("--target-load", "0.3", "--up-delay", "1", "--down-delay", "3", "--zero-delay", "3"),
            *("--queue-timeout", "120"),
        )
        await asyncio.to_thread(site.deploy, *scaling)
        # Of the weights that are deployed now, whatever was served before.
        expected = await reference(site)
        await until(lambda: site.nodes.pids(ENGINE) == set(), "no engine without work")
        async with AsyncClient(site.address) as client:
            status = await client.status()
            assert status.engines == ()
            assert status.ready, "a fleet that wakes on demand takes requests"
        began = time.monotonic()
        first = await read(site.address, 0)
        print(f"from no engine to the end of the first stream: {time.monotonic() - began:.1f} s")
        assert (first.failure, first.ids) == ("", expected[0])
        async with readers(site) as done:
            grew = await until(lambda: len(site.nodes.pids(ENGINE)) > 1, "more engines under load")
            print(f"a second engine after {grew:.1f} s")
        assert failures(done) == []
        assert all(seen.ids == expected[seen.number] for seen in done)
        await until(lambda: site.nodes.pids(ENGINE) == set(), "no engine without work")

    asyncio.run(scenario())


def test_a_place_that_does_not_exist_is_not_waited_for_without_end(site: Site) -> None:
    """Ray itself would wait for ever."""
    without = site.nodes.try_headway(
        *("deploy", "--model", str(site.old), "--address", site.address, "--device", "cuda")
    )
    assert without.returncode == 2
    assert "no node of the cluster has a GPU that Ray knows of" in without.stderr
    crowded = site.nodes.try_headway(
        *("deploy", "--model", str(site.old), "--address", site.address, "--dtype", "float32"),
        *("--num-blocks", "400", "--engine-drain", "1", "--router-drain", "1"),
        *("--routers", "5", "--routers-per-node", "1", "--timeout", "25"),
    )
    assert crowded.returncode == 1, crowded.stdout
    assert "not all replicas run after 25 s" in crowded.stderr
    assert "Router: {" in crowded.stderr
