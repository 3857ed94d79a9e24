"""Brings the application onto a running Ray, for the first time or in place of what runs there."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from ray import serve

from cluster.actors.coordinator import CoordinatorClient, stop_coordinator
from cluster.actors.router import SERVING
from cluster.app import APP_NAME, application
from cluster.core.errors import HeadwayError
from cluster.progress import StageLines
from cluster.settings import ServeSettings

REPORT_PERIOD_S = 0.25
SERVING_WAIT_S = 30.0

Say = Callable[[str], None]


class StartFailed(HeadwayError):
    """A replica could not start; the message says why."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """logs: where Ray writes its logs, for people. timeout_s: for all replicas to be there; Ray
    itself waits for ever for a place that does not exist."""

    settings: ServeSettings
    say: Say
    logs: str
    timeout_s: float = math.inf

    def __call__(self) -> str:
        """Returns when all that was asked for runs, and nothing else any more: the address of the
        front door, with the port that was taken. Raises StartFailed."""
        settings = self.settings
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        # A new one has this code and no reports of an earlier start; what it needs, it is told.
        stop_coordinator()
        client = CoordinatorClient()
        anew = APP_NAME not in serve.status().applications
        with self._telling_progress():
            self._run()
            if anew:
                self._await_serving(client)
        ports = [report.port for report in client.reports() if report.port]
        host, _, port = settings.gateway.address.rpartition(":")
        return f"{host}:{ports[-1] if ports else port}"

    def _run(self) -> None:
        app = application(self.settings)
        outcome: Future[object] = Future()

        def run() -> None:
            try:
                outcome.set_result(serve.run(app, name=APP_NAME, route_prefix=None))
            except BaseException as error:
                outcome.set_exception(error)

        # A daemon: whoever gives up waiting must be able to leave.
        threading.Thread(target=run, name="serve-run", daemon=True).start()
        try:
            outcome.result(None if self.timeout_s == math.inf else self.timeout_s)
        except FutureTimeout:
            raise StartFailed(self._what_is_missing()) from None
        except RuntimeError as error:
            raise StartFailed(self._reason(error)) from error

    def _what_is_missing(self) -> str:
        deployments = serve.status().applications[APP_NAME].deployments
        found = "; ".join(
            f"{name}: {dict(status.replica_states)} {status.message}".strip()
            for name, status in deployments.items()
        )
        ranks = self.settings.gpus_per_rank * self.settings.worker.tensor_parallel_size
        gpus = f"; an engine needs a node with {ranks} free GPU(s)" if ranks else ""
        return (
            f"not all replicas run after {self.timeout_s:g} s ({found}){gpus}; `ray status` says "
            "what Ray waits for. It goes on trying: make room, deploy less, or `headway undeploy`"
        )

    def _await_serving(self, client: CoordinatorClient) -> None:
        """Until every router has found an engine; a call before that would be told to come back."""
        deadline = time.monotonic() + SERVING_WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                serving = sum(report.stage == SERVING for report in client.reports())
                if serving >= self.settings.routers:
                    return
            time.sleep(REPORT_PERIOD_S / 2)

    def _reason(self, error: RuntimeError) -> str:
        with contextlib.suppress(Exception):
            for report in CoordinatorClient().reports():
                if report.error:
                    return report.error
        return f"Ray Serve could not start the application ({error}); logs: {self.logs}"

    @contextlib.contextmanager
    def _telling_progress(self) -> Iterator[None]:
        done = threading.Event()
        teller = threading.Thread(target=self._tell_progress, args=(done,), daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join(5.0)

    def _tell_progress(self, done: threading.Event) -> None:
        client = CoordinatorClient()
        told: dict[str, StageLines] = {}
        while True:
            last_round = done.wait(REPORT_PERIOD_S)
            with contextlib.suppress(Exception):
                for report in client.reports():
                    lines = told.setdefault(
                        report.source, StageLines(self.say, f"{report.source}: ")
                    )
                    lines(report.error or report.stage, report.share)
            if last_round:
                return


def take_down() -> None:
    """End the application in order: its streams are told why, and may finish within seconds."""
    with contextlib.suppress(Exception):
        CoordinatorClient().end()
    serve.delete(APP_NAME)
    stop_coordinator()
