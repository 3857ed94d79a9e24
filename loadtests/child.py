"""`python -m loadtests.child`: an un-patched process that replays one shard for a parent.

In on stdin: one JSON line with the job, later one with the start time. Out on stdout, a JSON line
each: {"ready": scheduled}, {"record": ...} per finished request, {"end": ...}; or {"failed": why}.
"""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cluster.core.errors import HeadwayError
from loadtests.collect import ChildEnd
from loadtests.job import Job
from loadtests.records import Record
from loadtests.replayer import Replayer
from loadtests.scenario import shard_of
from loadtests.targets.base import Target, TargetSpec


def make_target(spec: TargetSpec) -> Target:
    """Raises HeadwayError for a kind that there is not."""
    if spec.kind == "headway":
        from loadtests.targets.headway import HeadwayTarget

        return HeadwayTarget(spec)
    if spec.kind == "openai":
        from loadtests.targets.openai import OpenAiTarget

        return OpenAiTarget(spec)
    raise HeadwayError(f"target kind must be headway or openai, got {spec.kind!r}")


class LineWriter:
    """Writes from a thread of its own: a parent that reads slowly must not delay a timestamp."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[Callable[[], str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put(self, make_line: Callable[[], str]) -> None:
        """make_line: called in the writer's thread."""
        self._lines.put(make_line)

    def put_json(self, value: dict[str, Any]) -> None:
        self.put(lambda: json.dumps(value))

    def close(self) -> None:
        """Returns when everything is written."""
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (make_line := self._lines.get()) is not None:
            sys.stdout.write(make_line() + "\n")
            sys.stdout.flush()


async def replay(job: Job, shard: int, shards: int, out: LineWriter) -> None:
    scenario = job.scenario
    rows = shard_of(scenario.schedule(), shard, shards)
    target = make_target(job.target)
    await target.open(scenario.seed)
    try:
        replayer = Replayer(target, scenario, rows, lambda record: out.put(_line(record)))
        out.put_json({"ready": len(rows)})
        line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        if not line:
            return
        await _run(
            replayer, shard, _users(job, shard, shards), json.loads(line)["start_unix_s"], out
        )
    finally:
        await target.close()


async def _run(replayer: Replayer, shard: int, users: int, start: float, out: LineWriter) -> None:
    # As servers do it: what lives for ever needs no collecting in the middle of a token.
    gc.collect()
    gc.freeze()
    facts = await replayer.run(shard, start, users)
    end = ChildEnd(facts, replayer.extra_histograms(), replayer.server)
    out.put_json({"end": asdict(end)})


def _users(job: Job, shard: int, shards: int) -> int:
    """This shard's part of a closed loop's users, at least one; 0 for an open loop."""
    users = job.scenario.closed_users
    return max(1, users // shards + (shard < users % shards)) if users else 0


def _line(record: Record) -> Callable[[], str]:
    return lambda: '{"record":' + record.to_json() + "}"


def main() -> int:
    values = json.loads(sys.stdin.readline())
    out = LineWriter()
    try:
        job = Job.from_json(values["job"])
        _loop_policy()
        asyncio.run(replay(job, values["shard"], values["shards"], out))
    except HeadwayError as error:
        why = str(error)
        out.put_json({"failed": why})
        return 1
    finally:
        out.close()
    return 0


def _loop_policy() -> None:
    """uvloop where there is one: less time per token."""
    try:
        import uvloop
    except ImportError:
        return
    uvloop.install()


if __name__ == "__main__":
    sys.exit(main())
