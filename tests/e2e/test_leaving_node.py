"""A node that is told to go, with the command that a Kubernetes pod runs before it ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml

from headway.client import Client, Delivery, Finished, Sampling
from headway.errors import HeadwayRpcError
from tests.e2e.app import free_port
from tests.e2e.ray_nodes import RayNodes
from tests.e2e.tiny_folder import write_tiny_folder

ROOT = Path(__file__).parents[2]
REPLICA = "ray::ServeReplica:headway"
DEADLINE_S = 60
READERS = 6

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def pre_stop() -> list[str]:
    """The manifest's `ray drain-node ...`, its options; the waiting after it is a shell's."""
    documents = yaml.safe_load_all((ROOT / "deploy/kuberay/rayservice.yaml").read_text())
    (service,) = (document for document in documents if document["kind"] == "RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    (container,) = group["template"]["spec"]["containers"]
    script = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    done = subprocess.run(
        # As the shell splits it, with a `ray` that prints what it is called with.
        ["bash", "-c", 'ray() { printf "%s\\n" "$@"; exit; }\n' + script],
        capture_output=True,
        text=True,
        check=True,
    )
    options = done.stdout.splitlines()
    options[options.index("--deadline-remaining-seconds") + 1] = str(DEADLINE_S)
    return options


def a_worker_node(address: str) -> str:
    code = (
        f"import json, ray; ray.init(address={address!r}, logging_level='ERROR'); "
        "print(json.dumps([n['NodeID'] for n in ray.nodes() "
        "if 'node:__internal_head__' not in n['Resources']]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    node: str = json.loads(done.stdout.splitlines()[-1])[0]
    return node


def replicas(raylet: int) -> int:
    found = 0
    for process in psutil.Process(raylet).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += process.cmdline()[0].startswith(REPLICA)
    return found


class Readers:
    """Streams one after the other on some connections, until told to stop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.finished = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(READERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _read(self, number: int) -> None:
        sampling = Sampling(max_tokens=150, temperature=0, ignore_eos=True)
        delivery = Delivery(resume_window_s=30)
        with Client(self._address) as client:
            while not self._stop.is_set():
                try:
                    *_, last = client.generate([3, 4, 5 + number], sampling, delivery=delivery)
                    assert isinstance(last, Finished)
                    self.finished += 1
                except HeadwayRpcError as error:
                    self.failures.append(str(error))


def test_a_node_is_emptied_before_it_goes_and_no_stream_fails(tmp_path):
    folder = write_tiny_folder(tmp_path / "model", max_len=2048)
    address = f"127.0.0.1:{free_port()}"
    with RayNodes(3) as nodes:
        nodes.headway(
            *("deploy", "--model", str(folder), "--address", address, "--num-blocks", "400"),
            *("--routers-per-node", "1", "--engines", "3", "--dtype", "float32"),
            *("--engine-drain", "5", "--router-drain", "15"),
        )
        node = a_worker_node(nodes.address)
        (raylet,) = (r for r in nodes.raylets if node in " ".join(psutil.Process(r).cmdline()))
        assert replicas(raylet) >= 1, "its router at least"
        readers = Readers(address)
        try:
            time.sleep(2.0)
            ray = [sys.executable, "-m", "ray.scripts.scripts", *pre_stop()]
            subprocess.run([*ray, "--address", nodes.address, "--node-id", node], check=True)
            began = time.monotonic()
            while replicas(raylet):
                assert time.monotonic() - began < DEADLINE_S, "still there at the deadline"
                time.sleep(0.5)
            before = readers.finished
            time.sleep(2.0)
        finally:
            readers.stop()
        assert readers.failures == []
        assert readers.finished > before, "the others go on"
        nodes.headway("undeploy")
