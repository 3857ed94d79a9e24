"""What a child is told to do, and the child as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.core.errors import HeadwayError
from loadtests.scenario import Scenario
from loadtests.targets.base import TargetSpec

ROOT = Path(__file__).parents[1]


class ChildFailed(HeadwayError):
    """A child could not do its part; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    scenario: Scenario = field(default_factory=Scenario)
    target: TargetSpec = field(default_factory=TargetSpec)

    def as_json(self) -> dict[str, Any]:
        return {"scenario": self.scenario.as_json(), "target": asdict(self.target)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Job:
        return Job(Scenario.from_json(values["scenario"]), TargetSpec(**values["target"]))


class Child:
    """A running `python -m loadtests.child`. Works under gevent's patched subprocess as well."""

    def __init__(self, job: Job, shard: int, shards: int) -> None:
        environment = dict(os.environ)
        paths = (str(ROOT), str(ROOT / "proto"), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment.setdefault("GRPC_VERBOSITY", "ERROR")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtests.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._shard = shard
        self._say({"job": job.as_json(), "shard": shard, "shards": shards})

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> int:
        """Requests that it is going to send. Raises ChildFailed."""
        for event in self.events():
            if "ready" in event:
                return int(event["ready"])
        raise ChildFailed(f"load child {self._shard} ended before it was ready")

    def go(self, start_unix_s: float) -> None:
        self._say({"start_unix_s": start_unix_s})

    def events(self) -> Iterator[dict[str, Any]]:
        """Parsed lines until its end. Raises ChildFailed for the reason that it gives."""
        stdout = self._process.stdout
        if stdout is None:
            return
        while line := stdout.readline():
            event: dict[str, Any] = json.loads(line)
            if "failed" in event:
                raise ChildFailed(event["failed"])
            yield event

    def stop(self) -> None:
        """End it if it has not ended by itself."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _say(self, value: dict[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise ChildFailed("the child has no stdin")
        try:
            stdin.write(json.dumps(value).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise ChildFailed(f"load child {self._shard} has ended: {error}") from error
