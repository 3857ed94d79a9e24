"""A Ray and Serve application on this one machine, started and stopped in order."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import ray
from ray import serve

from cluster.actors.coordinator import (
    NAMESPACE,
    CoordinatorClient,
    stop_coordinator,
)
from cluster.actors.router import SERVING
from cluster.app import APP_NAME, application
from cluster.core.errors import HeadwayError
from cluster.progress import StageLines
from cluster.settings import ServeSettings

OBJECT_STORE_BYTES = 96 << 20
"""Tokens never go through Ray's object store; this is about the least that Ray accepts."""
REPORT_PERIOD_S = 0.25
SERVING_WAIT_S = 30.0

Say = Callable[[str], None]


class StartFailed(HeadwayError):
    """A replica could not start; the message says why."""


class LocalCluster:
    """Context manager: Ray up on entry, everything down on exit, whatever happened in between."""

    def __init__(self, settings: ServeSettings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self.log_folder = ""
        """Where Ray and the replicas write their logs; known once Ray is up."""
        self.address = settings.gateway.address
        """Of the front door; with the port that was taken once deploy() is done."""
        self.model_name = Path(settings.worker.model).name

    def __enter__(self) -> LocalCluster:
        self._say("starting Ray on this machine")
        # A user's Ray cluster must not be touched, and nothing is reported to anybody.
        os.environ.pop("RAY_ADDRESS", None)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        context = ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        session: str = context.address_info["session_dir"]  # type: ignore[attr-defined]
        self.log_folder = os.path.join(session, "logs")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._say("shutting down: router, engines, Ray")
        # Ray prints that Serve's controller, told to end, has ended.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            with contextlib.suppress(Exception):
                serve.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(Exception):
                stop_coordinator()
            ray.shutdown()
        self._say("stopped")

    def deploy(self) -> None:
        """Start engines and routers; returns when all are ready. Raises StartFailed."""
        self._say(
            f"starting {self._settings.routers} router(s), {self._settings.engines} engine(s)"
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        with self._telling_progress():
            try:
                serve.run(application(self._settings), name=APP_NAME, route_prefix=None)
            except RuntimeError as error:
                raise StartFailed(self._reason(error)) from error
            self._await_serving()
        ports = [report.port for report in CoordinatorClient().reports() if report.port]
        host = self.address.rpartition(":")[0]
        self.address = f"{host}:{ports[-1]}" if ports else self.address

    def _await_serving(self) -> None:
        """Until every router has found an engine; a call before that would be told to come back."""
        client, deadline = CoordinatorClient(), time.monotonic() + SERVING_WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                serving = sum(report.stage == SERVING for report in client.reports())
                if serving >= self._settings.routers:
                    return
            time.sleep(REPORT_PERIOD_S / 2)

    def wait(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        while not stop.wait(0.2):
            pass

    def _reason(self, error: RuntimeError) -> str:
        with contextlib.suppress(Exception):
            for report in CoordinatorClient().reports():
                if report.error:
                    return report.error
        return f"Ray Serve could not start the application ({error}); logs: {self.log_folder}"

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
                        report.source, StageLines(self._say, f"{report.source}: ")
                    )
                    lines(report.error or report.stage, report.share)
            if last_round:
                return
