"""Plain `serve deploy` and `headway deploy` on the same file: the same application."""

from __future__ import annotations

import asyncio
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from headway.client import AsyncClient
from tests.e2e import reading
from tests.e2e.app import free_port
from tests.e2e.ray_nodes import ENGINE, ROUTER, RayNodes, without_ray
from tests.e2e.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SHIPPED = Path(__file__).parents[2] / "deploy/serve.yaml"


@dataclass
class Site:
    nodes: RayNodes
    dashboard: str
    address: str
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "serve.yaml"

    def write(self, engines: int, generation: str) -> None:
        """The shipped file, with a TOML file of this test's."""
        (self.folder / "headway.toml").write_text(
            f'[model]\npath = "{self.folder / "tiny"}"\ndtype = "float32"\n'
            f'[front_door]\naddress = "{self.address}"\n'
            f"[fleet]\nengines = {engines}\n[engine]\nnum_blocks = 300\n"
        )
        content = yaml.safe_load(SHIPPED.read_text())
        content["applications"][0]["args"] = {
            "config": str(self.folder / "headway.toml"),
            "generation": generation,
        }
        self.file.write_text(yaml.safe_dump(content))

    def serve_deploy(self) -> None:
        program = Path(sysconfig.get_path("scripts")) / "serve"
        environment = without_ray()
        done = subprocess.run(
            [program, "deploy", self.file, "--address", self.dashboard],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    async def serves(self, engines: int, within_s: float = 180.0) -> list[list[int]]:
        """What every request gets, once so many engines are there."""
        deadline = time.monotonic() + within_s
        async with AsyncClient(self.address) as client:
            await client.wait_ready(within_s)
            while len((await client.status()).engines) != engines:
                assert time.monotonic() < deadline, f"no {engines} engines"
                await asyncio.sleep(0.3)
        seen = await reading.reference(self.address)
        assert not [one.failure for one in seen if one.failure]
        return [one.ids for one in seen]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    write_tiny_folder(folder / "tiny", max_len=2048)
    port = free_port()
    with RayNodes(1, dashboard_port=port) as nodes:
        yield Site(nodes, f"http://127.0.0.1:{port}", f"127.0.0.1:{free_port()}", folder)


def test_both_ways_deploy_the_same_application(site: Site) -> None:
    site.write(engines=1, generation="1")
    site.serve_deploy()
    expected = asyncio.run(site.serves(1))
    engines = site.nodes.pids(ENGINE)
    assert (len(engines), len(site.nodes.pids(ROUTER))) == (1, 1)

    site.write(engines=2, generation="2")
    site.serve_deploy()
    assert asyncio.run(site.serves(2)) == expected

    said = site.nodes.headway("deploy", "--config", str(site.file)).stdout
    assert "ready:" in said
    assert asyncio.run(site.serves(2)) == expected
    assert not site.nodes.pids(ENGINE) & engines
    site.nodes.headway("undeploy")
    assert site.nodes.pids(ENGINE) | site.nodes.pids(ROUTER) == set()
