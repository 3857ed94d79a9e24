"""The coordinator: a named actor that knows which engines exist and what waits for them. Never in a
token's path."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import ray

from cluster.fleet.registry import DemandBoard, Directory, EngineRecord, EngineRegistry
from cluster.fleet.scaling import FleetDemand
from cluster.metrics.board import RouterSummary
from cluster.metrics.peers import RouterRegistry

logger = logging.getLogger(__name__)

COORDINATOR_NAME = "headway-coordinator"
NAMESPACE = "headway"
CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class StartupReport:
    """How far a replica's start has come. share: 0 to 1. error: why it failed, "" if it has not.
    port: of the front door, once a router listens; 0 otherwise."""

    source: str
    stage: str
    share: float
    error: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class FleetNews:
    """What a router is told: the engines that there are, and what the other routers told."""

    engines: Directory
    routers: list[RouterSummary]


class Coordinator:
    """State that engines and routers tell again within a second; safe to restart at any time."""

    def __init__(self) -> None:
        self._registry = EngineRegistry()
        self._demand = DemandBoard()
        self._routers = RouterRegistry()
        self._reports: dict[str, StartupReport] = {}
        self._ending = False

    def end(self) -> None:
        self._ending = True

    def ending(self) -> bool:
        return self._ending

    def renew(self, record: EngineRecord) -> FleetDemand:
        now = time.monotonic()
        self._registry.renew(record, now)
        return self._demand.total(now)

    def remove(self, engine_id: str, epoch: int) -> None:
        self._registry.remove(engine_id, epoch)

    def engine_ids(self) -> list[str]:
        return [record.engine_id for record in self._registry.alive(time.monotonic())]

    def follow(self, router_id: str, demand: FleetDemand, own: RouterSummary) -> FleetNews:
        now = time.monotonic()
        self._demand.tell(router_id, demand, now)
        return FleetNews(self._registry.directory(now), self._routers.meet(own, now))

    def report(self, report: StartupReport) -> None:
        self._reports[report.source] = report

    def reports(self) -> list[StartupReport]:
        return list(self._reports.values())


class CoordinatorClient:
    """Calls the coordinator, creating it if need be; blocking, for use from plain threads.

    Every call may raise ray's errors; callers go on with what they know.
    """

    def __init__(self) -> None:
        self._actor: Any = None

    def renew(self, record: EngineRecord) -> FleetDemand:
        """Keep an engine's lease; what waits at all routers."""
        demand: FleetDemand = self._call("renew", record)
        return demand

    def end(self) -> None:
        """Everything is going to stop, not only this replica or that."""
        self._call("end")

    def ending(self) -> bool:
        return bool(self._call("ending"))

    def remove(self, engine_id: str, epoch: int) -> None:
        self._call("remove", engine_id, epoch)

    def engine_ids(self) -> list[str]:
        """Engines that there are, by id."""
        found: list[str] = self._call("engine_ids")
        return found

    def follow(self, router_id: str, demand: FleetDemand, own: RouterSummary) -> FleetNews:
        """Tell what waits at a router, and of the router itself."""
        news: FleetNews = self._call("follow", router_id, demand, own)
        return news

    def report(self, report: StartupReport) -> None:
        """Best effort: a start must not fail because nobody can be told about it."""
        try:
            self._call("report", report)
        except Exception:
            logger.warning("the coordinator cannot be told: %s", report, exc_info=True)

    def reports(self) -> list[StartupReport]:
        reports: list[StartupReport] = self._call("reports")
        return reports

    def _call(self, method: str, *args: Any) -> Any:
        if self._actor is None:
            self._actor = (
                ray.remote(Coordinator)
                .options(
                    name=COORDINATOR_NAME,
                    namespace=NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                )
                .remote()
            )
        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=CALL_TIMEOUT_S)
        except Exception:
            self._actor = None  # looked up anew next time: it may have been replaced
            raise


def stop_coordinator() -> None:
    """Remove the coordinator, if there is one."""
    try:
        ray.kill(ray.get_actor(COORDINATOR_NAME, namespace=NAMESPACE))
    except ValueError:
        return
