"""A Serve replica that is one engine."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import ray
from ray import serve

from cluster.actors.coordinator import CoordinatorClient, StartupReport
from cluster.actors.loop_thread import LoopThread
from cluster.actors.scaling import published
from cluster.core.errors import HeadwayError
from cluster.core.modelinfo import ModelInfo
from cluster.fleet.registry import EngineRecord
from cluster.fleet.scaling import EngineUse, FleetDemand

logger = logging.getLogger(__name__)

LEASE_PERIOD_S = 1.0


class Engine(Protocol):
    """What the replica runs (hop.service.EngineService)."""

    epoch: int
    model: ModelInfo

    def use(self) -> EngineUse: ...

    async def start(self) -> int: ...

    async def drain(self, grace_s: float) -> None: ...

    async def stop(self, reason: str) -> None: ...

    def health_problem(self) -> str | None: ...


class EngineProgress(Protocol):
    def __call__(self, stage: str, share: float) -> None: ...


class EngineFactory(Protocol):
    """Loads the model; runs inside the replica. host: the interface to listen on."""

    def __call__(self, engine_id: str, host: str, progress: EngineProgress) -> Engine: ...


class EngineReplica:
    """Loads, registers, and keeps its lease until it is stopped.

    host: interface to take in routers on; None is this node's address. drain_s: what has not ended
    by then, when this replica is to go, goes on at another engine.
    """

    def __init__(self, build: EngineFactory, host: str | None, drain_s: float) -> None:
        logging.basicConfig(level=logging.INFO)
        self._engine_id = f"engine-{serve.get_replica_context().replica_id.unique_id}"
        self._coordinator = CoordinatorClient()
        self._stopping = threading.Event()
        self._drain_s = drain_s
        host = host or node_address()
        try:
            self._engine = build(self._engine_id, host, self._progress)
        except HeadwayError as error:
            self._coordinator.report(StartupReport(self._engine_id, "failed", 0.0, str(error)))
            raise
        self._loop = LoopThread("hop")
        port = self._loop.run(self._engine.start())
        self._record = EngineRecord(
            self._engine_id, host, port, self._engine.epoch, self._engine.model
        )
        self._demand = FleetDemand()
        self._keeper = threading.Thread(target=self._keep_lease, name="lease", daemon=True)
        self._keeper.start()
        self._progress("ready", 1.0)
        logger.info("%s listens for routers on %s:%d", self._engine_id, host, port)

    def check_health(self) -> None:
        """Called by Serve; raising gets this replica replaced."""
        problem = self._engine.health_problem()
        if problem is not None:
            raise RuntimeError(problem)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for its autoscaling policy (actors.scaling)."""
        return published(self._engine.use(), self._engine.model.pool_tokens, self._demand)

    def wake(self) -> None:
        """Called by routers that have work and no engine: that somebody asks is all there is to
        it, it makes Serve start one."""

    def __del__(self) -> None:
        # Serve calls this at shutdown, also when the constructor did not get to its end.
        if not hasattr(self, "_record") or self._stopping.is_set():
            return
        self._stopping.set()
        # Scale-in, a rolling update or the end of all: what is under way is finished first.
        self._loop.run(self._engine.drain(self._drain_s), timeout_s=self._drain_s + 5.0)
        self._loop.run(self._engine.stop("the engine shuts down"), timeout_s=20.0)
        try:
            self._coordinator.remove(self._engine_id, self._record.epoch)
        except Exception:
            logger.info("the coordinator is gone before this engine", exc_info=True)
        self._loop.stop()

    def _progress(self, stage: str, share: float) -> None:
        self._coordinator.report(StartupReport(self._engine_id, stage, share))

    def _keep_lease(self) -> None:
        while not self._stopping.is_set():
            try:
                self._demand = self._coordinator.renew(self._record)
            except Exception:
                logger.warning("lease not renewed; routers go on with what they know")
            self._stopping.wait(LEASE_PERIOD_S)


def node_address() -> str:
    """The address of this node as Ray was started with it, and not as the network card has it."""
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["NodeID"] == node_id:
            return str(node["NodeManagerAddress"])
    raise RuntimeError(f"Ray does not list its own node {node_id}")
