"""The Locust master's part: shards handed out, one start for all, results merged and judged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from cluster.core.errors import HeadwayError
from loadtests.collect import ChildEnd, Results
from loadtests.objectives import EXIT_INVALID, load_objectives
from loadtests.options import job_of, limits_of
from loadtests.outcome import judge
from loadtests.records import Record
from loadtests.report import result_folder, write_outcome

START_DELAY_S = 1.0
EXIT_BAD_INPUT = 2
"""As of the `headway` command."""


class Master:
    """One for the process; every test (the web UI can start several) begins from nothing."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._runner = environment.runner
        self._reset(0)
        for kind, handler in (
            ("headway-ready", self._on_ready),
            ("headway-records", self._on_records),
            ("headway-end", self._on_end),
            ("headway-failed", self._on_failed),
        ):
            self._runner.register_message(kind, handler)
        environment.events.test_start.add_listener(self._on_test_start)
        environment.events.test_stop.add_listener(self._on_test_stop)
        environment.events.quitting.add_listener(self._on_quitting)

    def tick(self) -> tuple[int, float] | None:
        """How many users there are to be; None ends the test."""
        if self._over():
            return None
        users = self._shards or len(self._worker_ids())
        return users, float(users)

    def _reset(self, shards: int) -> None:
        self._shards = shards
        self._results = Results()
        self._problem = ""
        self._exit_code = EXIT_INVALID

    def _over(self) -> bool:
        if not self._shards:
            return False
        heard = len(self._results.children) >= self._shards
        return heard or bool(self._problem) or len(self._worker_ids()) < self._shards

    def _worker_ids(self) -> list[str]:
        """Workers that are there; one name without distribution."""
        clients = getattr(self._runner, "clients", None)
        if clients is None:
            return ["local"]
        return [client.id for client in clients.values() if client.state != "missing"]

    def _on_test_start(self, environment: Any, **_: Any) -> None:
        workers = self._worker_ids()
        self._reset(len(workers))
        address = (environment.host or "127.0.0.1:50051").removeprefix("grpc://")
        options = environment.parsed_options
        try:
            load_objectives(options.slo)
            self._job = job_of(options, address, options.target)
            result_folder(options.out)
        except HeadwayError as error:
            self._problem = str(error)
            self._exit_code = EXIT_BAD_INPUT
            return
        for shard, worker in enumerate(workers):
            data = {"job": self._job.as_json(), "shard": shard, "shards": len(workers)}
            self._runner.send_message("headway-job", data, client_id=worker)

    def _on_ready(self, environment: Any, msg: Any, **_: Any) -> None:
        self._results.expect_child(msg.data["scheduled"])
        if self._results.expected_children == self._shards:
            go = {"start_unix_s": time.time() + START_DELAY_S}
            self._runner.send_message("headway-go", go)

    def _on_records(self, environment: Any, msg: Any, **_: Any) -> None:
        for values in msg.data["records"]:
            self._results.add_record(Record.from_json(values))

    def _on_end(self, environment: Any, msg: Any, **_: Any) -> None:
        self._results.add_child(ChildEnd.from_json(msg.data))

    def _on_failed(self, environment: Any, msg: Any, **_: Any) -> None:
        self._problem = msg.data["why"]

    def _on_test_stop(self, environment: Any, **_: Any) -> None:
        # The next test, which the web UI may start, must not find this one over.
        self._shards = 0
        if self._problem:
            print(f"\nload test not run: {self._problem}", flush=True)
            return
        options = environment.parsed_options
        outcome = judge(self._job, self._results, options.slo, limits_of(options))
        self._exit_code = outcome.exit_code
        folder = Path(options.out)
        write_outcome(outcome, folder)
        print("\n" + "\n".join(outcome.lines()))
        print(f"report: {folder / 'report.html'}", flush=True)

    def _on_quitting(self, environment: Any, **_: Any) -> None:
        environment.process_exit_code = self._exit_code
