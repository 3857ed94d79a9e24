"""What an operator sees of two routers and two engines through Ray: metrics, logs, top."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.commands.metrics import discovered
from headway.client import Client, Delta, Sampling
from loadtests.targets.base import TargetSpec
from loadtests.targets.headway import CONNECTIONS_PER_ROUTER, HeadwayTarget
from tests.e2e.app import App, free_port, headway
from tests.e2e.tiny_folder import write_tiny_folder
from tests.tcp import connections_to
from tests.unit.metrics.scrape import Samples, fetch, samples

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

PROMPT = [91, 17, 64, 33, 8]
CALLS, TOKENS = 12, 20


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[App]:
    folder: Path = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    command = headway(
        *("serve", "--model", str(folder), "--address", "{address}"),
        *("--engines", "2", "--routers", "2", "--num-blocks", "120", "--dtype", "float32"),
        *("--metrics-port", str(port), "--log-format", "json", "--log-level", "debug"),
    )
    app = App(command).start()
    yield app
    assert app.stop() == 0, app.lines
    assert app.survivors() == []


@pytest.fixture(scope="module")
def outputs(app: App) -> list[list[int]]:
    """Each on a connection of its own, so that both routers get some."""
    found = []
    for number in range(CALLS):
        with Client(app.address) as client:
            sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, seed=number)
            events = list(client.generate([*PROMPT, number], sampling))
        found.append([i for e in events if isinstance(e, Delta) for i in e.token_ids])
    return found


def targets(port: int) -> dict[str, list[str]]:
    """Addresses by role, once all are there."""
    deadline = time.monotonic() + 20
    while True:
        found: dict[str, list[str]] = {"router": [], "engine": []}
        for group in json.loads(fetch(f"127.0.0.1:{port}", "/targets")):
            found[group["labels"]["role"]] += group["targets"]
        if sum(map(len, found.values())) == 4:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.3)


def test_one_known_port_leads_to_all(app: App, port: int, outputs: list[list[int]]) -> None:
    found = targets(port)
    assert f"127.0.0.1:{port}" in found["router"]
    assert len(set(found["router"])) == len(set(found["engine"])) == 2
    for address in found["router"]:
        assert sorted(json.loads(fetch(address, "/targets")), key=str) == sorted(
            json.loads(fetch(f"127.0.0.1:{port}", "/targets")), key=str
        )
    routers = [samples(fetch(address)) for address in found["router"]]
    engines = [samples(fetch(address)) for address in found["engine"]]

    def total(scrapes: list[Samples], *key: str) -> float:
        return sum(scrape[key] for scrape in scrapes)

    tokens = sum(map(len, outputs))
    assert total(routers, "headway_router_calls_total", "Generate", "OK") == CALLS
    assert total(routers, "headway_router_output_tokens_total") == tokens == CALLS * TOKENS
    assert total(engines, "headway_engine_emitted_tokens_total") == tokens
    assert all(scrape["headway_router_engines", "taking"] == 2 for scrape in routers)
    assert all(scrape["headway_engine_routers",] == 2 for scrape in engines)


def test_a_load_reaches_both_routers(app: App, port: int) -> None:
    """One connection would end at one of them."""
    targets(port)

    async def scenario() -> int:
        target = HeadwayTarget(TargetSpec("headway", app.address))
        await target.open(seed=0)
        try:
            return connections_to(app.address)
        finally:
            await target.close()

    assert asyncio.run(scenario()) == 2 * CONNECTIONS_PER_ROUTER


def test_top_and_the_front_door_know_both_routers(app: App, port: int, outputs: Any) -> None:
    targets(port)
    done = subprocess.run(
        headway("top", "--once", "--address", app.address), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 routers  2 engines" in done.stdout
    assert len(re.findall(r"(?m)^router-", done.stdout)) == 2
    with Client(app.address) as client:
        named = json.loads(discovered(client.status()))
    assert named == json.loads(fetch(f"127.0.0.1:{port}", "/targets"))


def test_logs_are_objects_with_ids_and_without_what_was_sent(
    app: App, outputs: list[list[int]]
) -> None:
    (ready,) = [line for line in app.lines if "ready:" in line]
    folder = Path(ready.rpartition("logs in ")[2])
    text = "".join(path.read_text(errors="replace") for path in folder.rglob("worker-*.err"))
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    ends = [line for line in lines if line["logger"] == "cluster.gateway.calls"]
    assert len(ends) == CALLS
    assert len({line["request_id"] for line in ends}) == CALLS
    assert {line["output_tokens"] for line in ends} == {TOKENS}
    assert len({line["router_id"] for line in lines if "router_id" in line}) == 2
    assert len({line["engine_id"] for line in lines if "engine_id" in line}) == 2
    everything = "".join(
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    )
    for ids in (PROMPT, *outputs):
        for form in (", ", ","):
            assert form.join(map(str, ids[:5])) not in everything
