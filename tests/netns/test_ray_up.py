"""`deploy/up` on three hosts, called from a fourth: real ssh, real `ray up`, a real network.

Streams are read from the fourth host through every node while nodes die, cables are cut, routers
are killed and nodes are drained. No stream may be lost, and every token is compared.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.ray_nodes import ENGINE, ROUTER
from tests.e2e.reading import WINDOW_S
from tests.e2e.tiny_folder import write_tiny_folder
from tests.netns.hosts import REPO, Host, Hosts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NODES = ("head", "w1", "w2")
PORT = 50051
READERS = 9
KEYS = "~/.ssh/id"
BIN = f"{sys.prefix}/bin"
RAYLET_LOG = "/tmp/ray/session_latest/logs/raylet.out"
NODE_IDS = """
import json, ray
ray.init(address="auto", logging_level="ERROR")
nodes = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps({node["NodeManagerAddress"]: node["NodeID"] for node in nodes}))
"""
LEFT = ("ray::", "/root/headway/venv")
"""How the processes begin that Ray and Headway have on a node."""
CUT_S = 15.0
WORST_GAP_S = 3.0
"""Promised for the death of a node."""


@dataclass
class Site:
    hosts: Hosts
    lab: Path
    up_s: float = 0.0

    @property
    def caller(self) -> Host:
        return self.hosts["ctl"]

    @property
    def targets(self) -> list[str]:
        return [f"{self.hosts[name].address}:{PORT}" for name in NODES]

    def up(self, *more: str) -> str:
        (wheel,) = (self.lab / "wheel").glob("*.whl")
        command = (
            f"cd {REPO} && HEADWAY_BIN={BIN} HEADWAY_WHEEL={wheel} "
            f"deploy/up {self.lab}/cluster.yaml {self.lab}/headway.toml {' '.join(more)}"
        )
        return self.caller.run(command, timeout_s=600).stdout

    def ray(self, command: str) -> str:
        """On the head, as an operator does it there."""
        environment = "RAY_AUTH_MODE=token PATH=/root/headway/venv/bin:$PATH"
        return self.hosts["head"].run(f"{environment} {command}").stdout

    def replicas(self, title: str, host: str | None = None) -> list[psutil.Process]:
        found = []
        for name in (host,) if host is not None else NODES:
            for process in self.hosts[name].processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if " ".join(process.cmdline()).startswith(title):
                        found.append(process)
        return found

    def reader(self, *arguments: str) -> subprocess.Popen[str]:
        script = f"cd {REPO} && {BIN}/python -m tests.netns.reader {' '.join(arguments)}"
        return subprocess.Popen(
            ["nsenter", "-t", str(self.caller.init), "-a", "bash", "-lc", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def reference(self) -> list[list[int]]:
        said, _ = self.reader(self.targets[0], "reference").communicate(timeout=300)
        seen = json.loads(said.splitlines()[-1])
        assert not [one["failure"] for one in seen if one["failure"]]
        return [one["ids"] for one in seen]

    @contextmanager
    def reading(self, window_s: float = WINDOW_S) -> Iterator[list[dict[str, Any]]]:
        """Streams without pause while the block runs; after it, all of them are in the list."""
        seen: list[dict[str, Any]] = []
        process = self.reader(",".join(self.targets), str(READERS), str(window_s))
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "reading"
        time.sleep(2.0)
        try:
            yield seen
        finally:
            said, _ = process.communicate(timeout=180)
            seen += json.loads(said.splitlines()[-1])

    def whole(self) -> bool:
        return len(self.replicas(ENGINE)) == 3 and len(self.replicas(ROUTER)) == 3


def until(holds: Callable[[], bool], what: str, within_s: float = 120.0) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.3)
    return time.monotonic() - began


def cluster_file(site_hosts: Hosts) -> str:
    """The shipped example with these hosts in it, and no network to install from."""
    cluster = yaml.safe_load((REPO / "deploy/local.yaml").read_text())
    cluster["provider"]["head_ip"] = site_hosts["head"].address
    cluster["provider"]["worker_ips"] = [site_hosts["w1"].address, site_hosts["w2"].address]
    cluster["auth"] = {"ssh_user": "root", "ssh_private_key": KEYS}
    python = f"PYTHON={sys.base_prefix}/bin/python3"
    packages = f"HEADWAY_PACKAGES={sysconfig.get_path('purelib')} {python}"
    cluster["setup_commands"] = [f"{packages} {line}" for line in cluster["setup_commands"]]
    text: str = yaml.safe_dump(cluster)
    return text


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # Not pytest's folder: Unix sockets have short names.
    lab = Path(tempfile.mkdtemp(prefix="hw-"))
    try:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
                *("--wheel-dir", str(lab / "wheel"), str(REPO)),
            ],
            check=True,
        )
        model = write_tiny_folder(lab / "tiny", max_len=2048)
        (lab / "headway.toml").write_text(
            f'[model]\npath = "{model}"\ndtype = "float32"\n'
            f'[front_door]\naddress = "0.0.0.0:{PORT}"\n'
            "[fleet]\nengines = 3\nrouters_per_node = 1\n"
            "[engine]\nnum_blocks = 400\n"
            "[rollout]\nengine_drain = 3\nrouter_drain = 20\n"
        )
        with Hosts(lab, ("ctl", *NODES)) as hosts:
            (lab / "cluster.yaml").write_text(cluster_file(hosts))
            site = Site(hosts, lab)
            began = time.monotonic()
            try:
                print(site.up())
            except AssertionError:
                for name in NODES:
                    said = hosts[name].run(f"tail -n 60 {RAYLET_LOG}", check=False).stdout
                    print(f"-- {name}: {said}")
                raise
            site.up_s = time.monotonic() - began
            yield site
    finally:
        shutil.rmtree(lab, ignore_errors=True)


def verdict(seen: list[dict[str, Any]], expected: list[list[int]]) -> float:
    """No stream failed, no token differs; the longest gap of any."""
    assert [one["failure"] for one in seen if one["failure"]] == []
    assert len(seen) >= READERS
    assert [one["number"] for one in seen if one["ids"] != expected[one["number"]]] == []
    return max(one["longest_gap_s"] for one in seen)


def test_three_nodes_come_up_with_a_router_and_an_engine_each(site: Site) -> None:
    print(f"three nodes up and serving after {site.up_s:.0f} s")
    assert site.up_s < 120
    assert site.whole()
    for name in NODES:
        assert len(site.replicas(ROUTER, name)) == 1, "one router per node"
    expected = site.reference()
    with site.reading() as seen:
        time.sleep(3.0)
    print(f"longest gap without a fault {verdict(seen, expected):.2f} s")
    assert {engine for one in seen for engine in one["engines"]} != set()


def test_the_dashboard_and_the_token_keep_strangers_out(site: Site) -> None:
    head = site.hosts["head"].address
    probe = f"timeout 3 bash -c '</dev/tcp/{head}/8265'"
    assert site.caller.run(probe, check=False).returncode != 0, "the dashboard is for loopback"
    code = f"import ray; ray.init(address='{head}:6379', logging_level='ERROR')"
    stranger = site.caller.run(
        f'RAY_AUTH_MODE=disabled timeout 60 {BIN}/python -c "{code}"', check=False
    )
    assert stranger.returncode != 0, "Ray let somebody in without a token"


def test_a_router_killed(site: Site) -> None:
    expected = site.reference()
    with site.reading() as seen:
        site.replicas(ROUTER, "w1")[0].kill()
        took = until(site.whole, "the router is replaced")
        time.sleep(2.0)
    gap = verdict(seen, expected)
    print(f"router killed: replaced after {took:.0f} s, longest gap {gap:.2f} s")


def test_a_cable_cut_and_mended(site: Site) -> None:
    expected = site.reference()
    with site.reading() as seen:
        site.hosts["w1"].cut_cable()
        time.sleep(CUT_S)
        site.hosts["w1"].mend_cable()
        time.sleep(2.0)
    gap = verdict(seen, expected)
    print(f"cable cut for {CUT_S:g} s: longest gap {gap:.2f} s")
    # Ray has given the node up by then: it joins again as one that was killed does.
    site.up("--nodes-timeout", "120")
    took = until(site.whole, "three engines and routers again")
    print(f"whole {took:.0f} s after `deploy/up`")
    assert gap < CUT_S - 4.0, "streams waited for the cable instead of going on elsewhere"


def test_a_node_killed_and_joined_again(site: Site) -> None:
    expected = site.reference()
    with site.reading() as seen:
        killed = site.hosts["w2"].kill_everything()
        time.sleep(15.0)
    gap = verdict(seen, expected)
    print(f"node killed ({killed} processes): longest gap {gap:.2f} s")
    assert killed > 3
    site.up("--nodes-timeout", "120")
    took = until(site.whole, "the node is back with its router")
    print(f"joined again {took:.0f} s after `deploy/up`")
    assert site.reference() == expected
    assert gap <= WORST_GAP_S


def test_a_node_drained(site: Site) -> None:
    expected = site.reference()
    listed = site.ray(f"python -c {shlex.quote(NODE_IDS)}")
    node = json.loads(listed.splitlines()[-1])[site.hosts["w2"].address]
    with site.reading() as seen:
        site.ray(
            f"ray drain-node --node-id {node} --reason DRAIN_NODE_REASON_PREEMPTION "
            "--reason-message maintenance --deadline-remaining-seconds 60 --address auto"
        )
        took = until(lambda: not site.replicas(ENGINE, "w2"), "the engine has left the node")
        time.sleep(2.0)
    print(f"node drained after {took:.0f} s, longest gap {verdict(seen, expected):.2f} s")


def test_the_head_killed_and_started_again(site: Site) -> None:
    """Ray's own state is gone with it, and `deploy/up` starts every node anew. What clients hold
    of their streams outlives even that."""
    expected = site.reference()
    with site.reading(window_s=300.0) as seen:
        killed = site.hosts["head"].kill_everything()
        time.sleep(10.0)
        began = time.monotonic()
        site.up("--nodes-timeout", "120")
        until(site.whole, "three engines and routers again")
        took = time.monotonic() - began
        time.sleep(2.0)
    gap = verdict(seen, expected)
    print(f"head killed ({killed} processes): whole {took:.0f} s after the call of `deploy/up`")
    print(f"longest gap {gap:.2f} s")
    assert gap < took, "streams ended with the head, and not with the restart of their own nodes"


def test_down(site: Site) -> None:
    command = f"cd {REPO} && HEADWAY_BIN={BIN} deploy/down {site.lab}/cluster.yaml"
    site.caller.run(command, timeout_s=300)
    deadline = time.monotonic() + 60.0
    while left := [p.name() for title in LEFT for p in site.replicas(title)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.5)
