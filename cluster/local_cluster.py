"""A Ray and Serve application on this one machine, started and stopped in order."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray import serve

from cluster.actors.coordinator import NAMESPACE, CoordinatorClient, stop_coordinator
from cluster.rollcall import RollCall
from cluster.rollout import Rollout, Say
from cluster.settings import ServeSettings

OBJECT_STORE_BYTES = 96 << 20
"""Tokens never go through Ray's object store; this is about the least that Ray accepts."""
ROLL_CALL_PERIOD_S = 1.0

QUIET = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "AUTOSCALER_UPDATE_INTERVAL_S": "60",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S": "2",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_task_events_report_interval_ms": "0",
}
"""Environment of a Ray whose nodes nobody watches and nobody adds to: its housekeeping would take a
tenth of the tokens per second where engines have all cores but share them."""


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
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        context = ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        self._end_log_monitor()
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
                CoordinatorClient().end()
            with contextlib.suppress(Exception):
                serve.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(Exception):
                stop_coordinator()
            ray.shutdown()
        self._say("stopped")

    @staticmethod
    def _end_log_monitor() -> None:
        """It reads all logs ten times a second, to print what nobody is to see (log_to_driver)."""
        with contextlib.suppress(Exception):  # Ray promises no such call
            node: Any = ray._private.worker._global_node
            node.kill_log_monitor(check_alive=False)

    def deploy(self) -> None:
        """Start engines and routers; returns when all are ready. Raises StartFailed."""
        self._say(
            f"starting {self._settings.routers} router(s), {self._settings.engines} engine(s)"
        )
        self.address = Rollout(self._settings, self._say, self.log_folder)()

    def wait(self, stop: threading.Event) -> None:
        """Until `stop` is set. Meanwhile engines that go and come are told of."""
        coordinator, roll_call = CoordinatorClient(), RollCall(self._say)
        while not stop.wait(ROLL_CALL_PERIOD_S):
            with contextlib.suppress(Exception):  # the coordinator may be starting again
                roll_call(coordinator.engine_ids())
