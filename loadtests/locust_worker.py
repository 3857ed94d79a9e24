"""A Locust worker's part: one child process, its numbers into Locust's tables and to the master."""

from __future__ import annotations

from typing import Any

import gevent  # type: ignore[import-untyped,import-not-found,unused-ignore]
import gevent.queue  # type: ignore[import-untyped,import-not-found,unused-ignore]

from cluster.core.errors import HeadwayError
from loadtests.job import Child, Job
from loadtests.records import Record

BATCH_PERIOD_S = 0.5
METRIC = "metric"


class Worker:
    """Waits for jobs from the master, and runs them one after the other."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._runner = environment.runner
        self._jobs: Any = gevent.queue.Queue()
        self._child: Child | None = None
        self._runner.register_message("headway-job", self._on_job)
        self._runner.register_message("headway-go", self._on_go)

    def replay_next(self) -> None:
        """Run the next job; a second user of one worker waits here for ever."""
        values = self._jobs.get()
        shard = values["shard"]
        try:
            self._child = Child(Job.from_json(values["job"]), shard, values["shards"])
            self._tell("headway-ready", {"shard": shard, "scheduled": self._child.wait_ready()})
            self._forward()
        except HeadwayError as error:
            self._tell("headway-failed", {"shard": shard, "why": str(error)})
        finally:
            if self._child is not None:
                self._child.stop()

    def _forward(self) -> None:
        """Records in batches: a message per token would be Locust's load, not the server's."""
        if self._child is None:
            return
        batch: list[dict[str, Any]] = []
        sender = gevent.spawn(self._send_batches, batch)
        try:
            for event in self._child.events():
                if "record" in event:
                    batch.append(event["record"])
                    self._show(Record.from_json(event["record"]))
                elif "end" in event:
                    self._flush(batch)
                    self._tell("headway-end", event["end"])
        finally:
            gevent.kill(sender)

    def _send_batches(self, batch: list[dict[str, Any]]) -> None:
        while True:
            gevent.sleep(BATCH_PERIOD_S)
            self._flush(batch)

    def _flush(self, batch: list[dict[str, Any]]) -> None:
        if batch:
            records = list(batch)
            batch.clear()
            self._tell("headway-records", {"records": records})

    def _show(self, record: Record) -> None:
        """One request in Locust's own count (E2E); the metrics are rows beside it."""
        self._environment.events.request.fire(
            request_type="stream",
            name="E2E",
            response_time=1e3 * max(0.0, record.e2e_s),
            response_length=record.tokens,
            exception=None if record.ok else HeadwayError(record.error or "tokens were lost"),
        )
        if record.warmup or not record.ok:
            return
        self._log("TTFT", 1e3 * record.ttft_s)
        if record.tpot_s is not None:
            self._log("TPOT", 1e3 * record.tpot_s)
        if record.gaps_us:
            self._log("longest gap", max(record.gaps_us) / 1e3)
        for gap in record.gaps_us:
            self._log("ITL", gap / 1e3)
        if record.queue_s is not None:
            self._log("queue time", 1e3 * record.queue_s)
        self._log("preemptions (count)", record.preemptions)
        self._log("resumes (count)", record.replays)

    def _log(self, name: str, value: float) -> None:
        self._runner.stats.get(name, METRIC).log(value, 0)

    def _tell(self, kind: str, data: dict[str, Any]) -> None:
        self._runner.send_message(kind, data)

    def _on_job(self, environment: Any, msg: Any, **_: Any) -> None:
        self._jobs.put(msg.data)

    def _on_go(self, environment: Any, msg: Any, **_: Any) -> None:
        if self._child is not None:
            self._child.go(msg.data["start_unix_s"])
