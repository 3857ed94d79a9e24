"""A Serve replica that is one router: its own gRPC server, outside of Serve's request path."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

from ray import serve

from cluster.actors.coordinator import CoordinatorClient, StartupReport
from cluster.actors.loop_thread import LoopThread
from cluster.core.errors import HeadwayError

logger = logging.getLogger(__name__)

DIRECTORY_PERIOD_S = 0.5
SERVING = "serving"
"""Stage of a router that has an engine."""


class Router(Protocol):
    """What the replica runs (app.RunningRouter). Its coroutines belong to one asyncio loop."""

    port: int

    def ready(self) -> bool: ...

    async def set_engines(self, addresses: set[tuple[str, int]]) -> None: ...

    async def stop(self) -> None: ...


class RouterFactory(Protocol):
    async def __call__(self, router_id: str) -> Router: ...


class RouterReplica:
    """Runs the router and tells it which engines exist.

    engines: the engines' deployment handle; it makes Serve deploy them in the same application,
    and is never called: tokens have a path of their own.
    """

    def __init__(self, build: RouterFactory, engines: Any) -> None:
        logging.basicConfig(level=logging.INFO)
        self._engines = engines
        self._router_id = f"router-{serve.get_replica_context().replica_id.unique_id}"
        self._coordinator = CoordinatorClient()
        self._stopping = threading.Event()
        self._loop = LoopThread("gateway")
        try:
            self._router = self._loop.run(build(self._router_id))
        except HeadwayError as error:
            self._coordinator.report(StartupReport(self._router_id, "failed", 0.0, str(error)))
            raise
        self._follower = threading.Thread(target=self._follow_engines, daemon=True)
        self._follower.start()
        self._coordinator.report(
            StartupReport(self._router_id, "ready", 1.0, port=self._router.port)
        )
        logger.info("%s serves on port %d", self._router_id, self._router.port)

    def check_health(self) -> None:
        """Called by Serve; raising gets this replica replaced."""
        if not self._loop.alive:
            raise RuntimeError("the gateway's event loop has ended")

    def __del__(self) -> None:
        # Serve calls this at shutdown, also when the constructor did not get to its end.
        if not hasattr(self, "_router") or self._stopping.is_set():
            return
        self._stopping.set()
        self._loop.run(self._router.stop(), timeout_s=30.0)
        self._loop.stop()

    def _follow_engines(self) -> None:
        told = False
        while not self._stopping.is_set():
            try:
                if not told and self._router.ready():
                    port = self._router.port
                    self._coordinator.report(
                        StartupReport(self._router_id, SERVING, 1.0, port=port)
                    )
                    told = True
                addresses = {record.address for record in self._coordinator.engines()}
                self._loop.run(self._router.set_engines(addresses), timeout_s=10.0)
            except Exception:
                logger.warning("no news of engines; going on with what is known", exc_info=True)
            self._stopping.wait(DIRECTORY_PERIOD_S)
