"""`locust -f loadtests/locustfile.py --host HOST:PORT`: web UI, headless, or master and workers.

Each Locust worker has one user, and that one drives an un-patched asyncio child (loadtests.child)
which replays the worker's shard: gevent streams would be measured instead of the server. Users
and run time follow from the schedule (`--arrivals`, `--requests`), so -u, -r and -t are not needed.
Exit code: 0 objectives met, 3 missed, 4 the run is invalid.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from locust import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    LoadTestShape,
    User,
    events,
    task,
)

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "proto")]

from loadtests.locust_master import Master  # noqa: E402
from loadtests.locust_worker import Worker  # noqa: E402
from loadtests.options import add_load_options, add_protocol_option  # noqa: E402

MASTERS: list[Master] = []
"""The one of this process: Locust gives its shape no other way to find it."""


def _add_options(parser: Any, **_: Any) -> None:
    add_load_options(parser)
    add_protocol_option(parser)


def _init(environment: Any, runner: Any, **_: Any) -> None:
    from locust.runners import WorkerRunner

    if runner is None:
        return
    if not isinstance(runner, WorkerRunner):
        MASTERS.append(Master(environment))
    environment.headway_worker = Worker(environment)


events.init_command_line_parser.add_listener(_add_options)  # type: ignore[no-untyped-call,unused-ignore]
events.init.add_listener(_init)  # type: ignore[no-untyped-call,unused-ignore]


class StreamUser(User):  # type: ignore[misc,unused-ignore]
    """The worker's one user."""

    @task
    def replay(self) -> None:
        self.environment.headway_worker.replay_next()


class UntilDrained(LoadTestShape):  # type: ignore[misc,unused-ignore]
    """One user per worker until the last answer has come."""

    def tick(self) -> tuple[int, float] | None:
        return MASTERS[-1].tick() if MASTERS else None
