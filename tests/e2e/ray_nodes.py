"""A Ray cluster of several nodes on this machine, each with a raylet of its own.

As a program, `python -m tests.e2e.ray_nodes COUNT [DASHBOARD_PORT]`, it is the process that owns
the nodes: it prints a line of JSON, takes commands from its standard input, and takes everything
down at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

import psutil

from tests.e2e.app import headway

ENGINE, ROUTER = "ray::ServeReplica:headway:Engine", "ray::ServeReplica:headway:Router"
"""How the processes of replicas are titled."""
START_S = 120.0
DEPLOY_S = 300.0
FAST_DEATH = {
    # Ray's defaults take 15 s to give a silent node up.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def without_ray() -> dict[str, str]:
    """The environment, without what it says to Ray."""
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}


class RayNodes:
    """Context manager: a head and more nodes. `address` is Ray's, for `headway deploy`.
    dashboard_port: of Ray's dashboard, eight processes; None for none."""

    def __init__(self, count: int, dashboard_port: int | None = None) -> None:
        self._arguments = [str(count)]
        if dashboard_port is not None:
            self._arguments.append(str(dashboard_port))

    def __enter__(self) -> RayNodes:
        environment = without_ray()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.ray_nodes", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | FAST_DEATH | {"RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,
        )
        facts = self._answer()
        self.address: str = facts["address"]
        self.raylets: list[int] = facts["raylets"]
        """Process ids; the head's first."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        family = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def add(self) -> int:
        """One more node: its raylet's process id."""
        assert self._process.stdin is not None
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        raylet: int = self._answer()["raylet"]
        self.raylets.append(raylet)
        return raylet

    def kill(self, raylet: int) -> list[int]:
        """SIGKILL a node: the raylet and every process it started, at once. Those that died."""
        node = psutil.Process(raylet)
        victims = [node, *node.children(recursive=True)]
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.raylets.remove(raylet)
        return [process.pid for process in victims]

    def node_of(self, pid: int) -> int:
        """The raylet that a process belongs to."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        (raylet,) = ancestors & set(self.raylets)
        return raylet

    def processes(self, title: str) -> list[psutil.Process]:
        """Live processes on any node whose title begins so."""
        found = []
        for raylet in self.raylets:
            for process in psutil.Process(raylet).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if " ".join(process.cmdline()).startswith(title):
                        found.append(process)
        return found

    def pids(self, title: str) -> set[int]:
        return {process.pid for process in self.processes(title)}

    def headway(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a `headway` command against this cluster; fails the test if it fails."""
        done = self.try_headway(*args)
        assert done.returncode == 0, f"{done.args}:\n{done.stdout}\n{done.stderr}"
        return done

    def try_headway(self, *args: str) -> subprocess.CompletedProcess[str]:
        environment = without_ray()
        return subprocess.run(
            headway(*args, "--ray-address", self.address),
            capture_output=True,
            text=True,
            timeout=DEPLOY_S,
            env=environment,
            check=False,
        )

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"the nodes' process ended with {self._process.wait(10)}")


def main(count: int, dashboard_port: int | None = None) -> None:
    from ray.cluster_utils import Cluster

    resources = {"num_cpus": 4, "object_store_memory": 96 << 20}
    head = {**resources, "include_dashboard": dashboard_port is not None}
    if dashboard_port is not None:
        head["dashboard_port"] = dashboard_port
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def raylet(node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    others = [cluster.add_node(**resources) for _ in range(count - 1)]
    facts = {
        "address": cluster.address,
        "raylets": [raylet(node) for node in [cluster.head_node, *others]],
    }
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            print(json.dumps({"raylet": raylet(cluster.add_node(**resources))}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
