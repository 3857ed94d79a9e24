"""A router that knows 1,000 engines: as many series as with one, and a scrape that stays quick."""

from __future__ import annotations

import asyncio
import json
import time

from cluster.core.load import EngineLoad
from cluster.core.outcome import LossCause
from cluster.hop.link import EngineLink, LinkListener, LinkSettings
from cluster.hop.messages import Frame, Welcome
from cluster.metrics import router
from cluster.metrics.board import RouterBoard
from cluster.router.dispatcher import Dispatcher
from tests.unit.metrics.scrape import fetch, samples
from tests.wire.wire_support import in_loop, tiny_model

ENGINES = 1000
LOAD = EngineLoad(9, 30, 64, 5, 2, 120, 50.0, 400, 3, 77)


class Connected:
    """A link whose engine is there at once and says the same as all others."""

    connected = True
    last_frame_s = 0.0
    lost_by = LossCause.CLOSED

    def __init__(
        self, address: tuple[str, int], settings: LinkSettings, listener: LinkListener
    ) -> None:
        self.address = address
        host, port = address
        listener.on_up(self, Welcome(2, f"{host}-{port}", 1, tiny_model(), 256, 8, 64, port))  # type: ignore[arg-type]
        draining = port % 10 == 0
        frame = Frame(1, time.time(), LOAD, 0, [], [], draining=draining)
        listener.on_frame(self, frame)  # type: ignore[arg-type]

    def send(self, message: object) -> None: ...

    def disconnect(self, reason: str) -> None: ...

    async def close(self) -> None: ...


def connect(address: tuple[str, int], settings: LinkSettings, listener: LinkListener) -> EngineLink:
    return Connected(address, settings, listener)  # type: ignore[return-value]


@in_loop
async def test_a_thousand_engines() -> None:
    dispatcher = Dispatcher(LinkSettings("r0", "secret"), connect=connect)
    board = RouterBoard("r0", dispatcher.facts)
    try:
        await dispatcher.set_engines({("10.0.0.1", port) for port in range(10_000, 10_001)})
        one = samples(board.metrics.text())
        await dispatcher.set_engines({("10.0.0.1", 10_000 + n) for n in range(ENGINES)})
        many = samples(board.metrics.text())
        assert many.keys() == one.keys()
        assert len(many) == sum(family.series for family in router.FAMILIES)
        assert many["headway_router_engines", "taking"] == ENGINES * 9 // 10
        assert many["headway_router_engines", "draining"] == ENGINES // 10

        began = time.thread_time()
        for _ in range(20):
            board.metrics.text()
        # Some 0.5 ms on a quiet machine: no gap of a stream is longer for it.
        assert (time.thread_time() - began) / 20 < 0.005

        await board.serve("127.0.0.1", 0, dispatcher.scraped)
        found = json.loads(await asyncio.to_thread(fetch, board.address, "/targets"))
        assert len(found) == ENGINES + 1
    finally:
        await board.close()
        await dispatcher.close()
