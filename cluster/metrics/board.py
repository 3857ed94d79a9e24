"""One router as it is told of: to Prometheus, to the other routers, to whoever asks it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cluster.buildinfo import headway_version
from cluster.metrics import family, targets
from cluster.metrics.facts import RouterFacts
from cluster.metrics.http import MetricsServer, Page
from cluster.metrics.router import RouterMeter, RouterMetrics
from cluster.metrics.targets import Target
from cluster.metrics.window import Tail


class RouterSummary(NamedTuple):
    """What routers know of each other, a second old or so. metrics: host:port, "" for none.
    calls: in progress."""

    router_id: str
    metrics: str
    version: str
    uptime_s: float
    ready: bool
    calls: int
    queued: int
    queued_tokens: int
    relief_moves: int
    tails: tuple[Tail, ...]


class RouterBoard:
    """Measures a router, and knows the others. meter: what the gateway tells what it sees; put
    another one here to measure nothing."""

    def __init__(self, router_id: str, facts: Callable[[], RouterFacts]) -> None:
        self.router_id = router_id
        self.metrics = RouterMetrics(facts, {"router_id": router_id, "version": headway_version()})
        self.meter: RouterMeter = self.metrics
        self.address = ""
        """Where it is scraped, host:port."""
        self.peers: list[RouterSummary] = []
        """The other routers, replaced as a whole."""
        self._facts = facts
        self._started_s = time.monotonic()
        self._server: MetricsServer | None = None
        self._told: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
        self._text = ""

    def summary(self) -> RouterSummary:
        """From any thread."""
        facts, now = self._facts(), time.monotonic()
        return RouterSummary(
            self.router_id,
            self.address,
            headway_version(),
            now - self._started_s,
            facts.engines > 0,
            self.metrics.calls,
            facts.queued,
            facts.queued_tokens,
            facts.relief_moves,
            tuple(self.metrics.tails(now)),
        )

    async def serve(
        self, host: str, port: int, engines: Callable[[], Iterable[tuple[str, str]]]
    ) -> None:
        """Let Prometheus in, until close(). engines: (id, address of its metrics) of those known.
        Raises OSError."""

        pages = {
            "/metrics": Page(family.CONTENT_TYPE, self.metrics.text),
            "/targets": Page(targets.CONTENT_TYPE, lambda: self._found(engines())),
        }
        self._server = MetricsServer(pages)
        bound = await self._server.start(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{bound}"

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            await self._server.stop()

    def _found(self, engines: Iterable[tuple[str, str]]) -> str:
        """Made anew only when somebody has come or gone: tokens go through this loop."""
        routers = [(self.router_id, self.address), *((p.router_id, p.metrics) for p in self.peers)]
        now = (routers, list(engines))
        if now != self._told:
            self._told = now
            self._text = targets.discovery(
                Target(address, role, name)
                for role, known in zip(("router", "engine"), now, strict=True)
                for name, address in known
            )
        return self._text
