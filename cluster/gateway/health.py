"""grpc.health.v1, told the truth several times a second: for the server, its services and every
engine that this router knows ("engine/NAME")."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from cluster.router.stream import TokenSource

ENGINE_PREFIX = "engine/"
POLL_S = 0.2
"""A lost engine shows within this time; the promise is one second."""

_log = logging.getLogger(__name__)


class HealthReporter:
    """Keeps a health servicer in step with `source.ready()`.

    services: names to report for, besides "" for the whole server.
    """

    def __init__(self, source: TokenSource, services: Collection[str]) -> None:
        self.servicer = health_aio.HealthServicer()
        self._source = source
        self._services = ("", *services)
        self._told: dict[str, bool] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Report once, then go on in the background."""
        await self._report()
        self._task = asyncio.create_task(self._poll(), name="health")

    async def stop(self) -> None:
        """NOT_SERVING from here on, whatever the source says. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        await self.servicer.enter_graceful_shutdown()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._report()

    async def _report(self) -> None:
        try:
            ready = self._source.ready()
            engines = {e.engine_id: e.connected and not e.draining for e in self._source.engines()}
        except Exception:
            # A reporter that died would leave the last answer standing for ever.
            _log.exception("the source cannot say how it is")
            ready, engines = False, {}
        # An engine that is gone stays NOT_SERVING: its name may come back.
        now = dict.fromkeys(self._told, False)
        now |= {ENGINE_PREFIX + engine_id: well for engine_id, well in engines.items()}
        now |= dict.fromkeys(self._services, ready)
        for name, well in now.items():
            if self._told.get(name) is not well:
                await self.servicer.set(name, _status(well))
        self._told = now


def _status(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    answer = health_pb2.HealthCheckResponse
    return answer.SERVING if serving else answer.NOT_SERVING
