"""What is done with each command of the documentation, in one table.

A command belongs to the first row whose words it begins with; one that belongs to none fails.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    RUN = "runs, by itself"
    SERVED = "runs against two engines and a router of this process"
    PARSED = "the command and its options exist"
    MADE = "make knows the target"
    SHELL = "a shell can read it, and the files of ours that it names exist"


@dataclass(frozen=True)
class Row:
    """more: put behind the command, where it would take too long or not end. codes: how it may
    exit. why: for what is not run as it stands."""

    begins: str
    way: Way
    more: str = ""
    codes: tuple[int, ...] = (0,)
    why: str = ""


_RAY = "needs a Ray cluster; tests/e2e/test_cluster.py runs it on three nodes"
_LONG = "takes minutes"
_OURS = "headway"

TABLE = (
    Row("headway simulate --article", Way.RUN),
    Row("headway simulate", Way.RUN, "--requests 60", why="a shorter workload"),
    Row("headway plan", Way.RUN, "--requests 60", why="a shorter workload"),
    Row("headway plots", Way.RUN, "--only policies --share 0.1", why="unit/bench/test_plots.py"),
    Row("headway config check", Way.RUN),
    Row("headway config show", Way.RUN),
    Row("headway doctor --address auto", Way.PARSED, why=_RAY),
    # 1: this machine may have a port taken or little memory left.
    Row("headway doctor", Way.RUN, codes=(0, 1)),
    Row("headway version", Way.RUN),
    Row("headway bench", Way.PARSED, why=_LONG),
    Row("headway generate", Way.SERVED),
    Row("headway chat", Way.SERVED, why="ends with its input, which is empty"),
    Row("headway status", Way.SERVED),
    Row("headway top", Way.SERVED, "--once", why="would not end"),
    Row("headway health --address", Way.PARSED, why="TLS: tests/wire/test_health_command.py"),
    Row("headway health", Way.SERVED),
    Row("headway drain", Way.SERVED),
    Row("headway metrics targets", Way.SERVED),
    Row(
        "headway loadtest run",
        Way.SERVED,
        "--requests 6 --arrivals constant:20 --output-mean 8",
        # 3: objectives missed, 4: the machine was too busy to measure.
        codes=(0, 3, 4),
        why="fewer requests",
    ),
    Row("headway loadtest", Way.PARSED, why="tests/load runs all of them"),
    Row("headway pull", Way.PARSED, why="a download; tests/wire/test_pull.py"),
    Row("headway replay", Way.PARSED, why="needs a log; tests/replay"),
    Row("headway serve", Way.PARSED, why="tests/e2e/test_make_serve.py"),
    Row("headway deploy", Way.PARSED, why=_RAY),
    Row("headway undeploy", Way.PARSED, why=_RAY),
    Row("HEADWAY_API_KEY=... headway", Way.PARSED, why="TLS and keys: tests/wire/test_client.py"),
    Row("make", Way.MADE, why="installs, or takes minutes"),
    Row("deploy/", Way.SHELL, why="needs machines; tests/netns runs both"),
    Row("docker", Way.SHELL, why="tests/deploy reads the file; no docker here"),
    Row("apt-get install", Way.SHELL, why="changes the machine"),
    Row("prometheus", Way.SHELL, why="tests/wire/test_prometheus.py"),
    Row("pip install", Way.SHELL, why="changes the environment"),
    Row("serve deploy", Way.SHELL, why="tests/e2e/test_serve_deploy.py runs it"),
    Row("ray", Way.SHELL, why="tests/e2e/test_leaving_node.py drains a node"),
    Row("locust", Way.SHELL, why="tests/load/test_locust.py"),
    Row("cp", Way.SHELL, why="trivial"),
)


def words(command: str) -> list[str]:
    """As a shell splits it, with our program by its plain name."""
    return [w.removeprefix(".venv/bin/") for w in shlex.split(command)]


def row_of(command: str) -> Row | None:
    plain = " ".join(words(command))
    fits = (row for row in TABLE if plain == row.begins or plain.startswith(_prefix(row)))
    return next(fits, None)


def _prefix(row: Row) -> str:
    return row.begins if row.begins.endswith("/") else row.begins + " "


def argv(command: str) -> list[str]:
    """What `headway` is called with."""
    found = words(command)
    return found[found.index(_OURS) + 1 :]
