"""A Serve replica that is one router: its own gRPC server, outside of Serve's request path."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

from ray import serve

from cluster.actors.coordinator import CoordinatorClient, StartupReport
from cluster.actors.loop_thread import LoopThread
from cluster.core.errors import HeadwayError
from cluster.fleet.registry import Directory
from cluster.fleet.scaling import FleetDemand
from cluster.metrics.board import RouterSummary

logger = logging.getLogger(__name__)

DIRECTORY_PERIOD_S = 0.5
END_GRACE_S = 5.0
"""For the streams of an application that stops as a whole."""
SERVING = "serving"
"""Stage of a router that has an engine."""


class Router(Protocol):
    """What the replica runs (app.RunningRouter). Its coroutines belong to one asyncio loop."""

    port: int

    def ready(self) -> bool: ...

    async def refresh(self, directory: Directory) -> FleetDemand:
        """The engines that there are; what waits for one here."""

    def told(self) -> RouterSummary:
        """What the other routers may know of it. From any thread, as `meet`."""

    def meet(self, peers: list[RouterSummary]) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


class RouterFactory(Protocol):
    async def __call__(self, router_id: str) -> Router: ...


class Waker:
    """Asks Serve for an engine while requests wait and there is none (scaled to zero)."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines
        self._asked: Any = None

    def look(self, demand: FleetDemand, directory: Directory) -> None:
        if directory.engines or not demand.queued:
            self._asked = None
        elif self._asked is None:
            # Kept, not awaited: Serve counts it as a request that waits for a replica.
            self._asked = self._engines.wake.remote()


class RouterReplica:
    """Runs the router and tells it which engines exist.

    engines: the engines' deployment handle. It makes Serve deploy them in the same application, and
    is called only to wake an engine where there is none: tokens have a path of their own. drain_s:
    how long streams may go on when this replica is replaced.
    """

    def __init__(self, build: RouterFactory, engines: Any, drain_s: float) -> None:
        logging.basicConfig(level=logging.INFO)
        self._waker = Waker(engines)
        self._drain_s = drain_s
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
        grace_s = END_GRACE_S if self._end_of_all() else self._drain_s
        self._loop.run(self._router.stop(grace_s), timeout_s=grace_s + 20.0)
        self._loop.stop()

    def _end_of_all(self) -> bool:
        """Whether the whole application stops: nobody will be here for the streams' sequel."""
        try:
            return self._coordinator.ending()
        except Exception:
            return True

    def _follow_engines(self) -> None:
        told, demand = False, FleetDemand()
        while not self._stopping.is_set():
            try:
                if not told and self._router.ready():
                    port = self._router.port
                    self._coordinator.report(
                        StartupReport(self._router_id, SERVING, 1.0, port=port)
                    )
                    told = True
                news = self._coordinator.follow(self._router_id, demand, self._router.told())
                demand = self._loop.run(self._router.refresh(news.engines), timeout_s=10.0)
                self._waker.look(demand, news.engines)
                self._router.meet(news.routers)
            except Exception:
                logger.warning("no news of engines; going on with what is known", exc_info=True)
            self._stopping.wait(DIRECTORY_PERIOD_S)
