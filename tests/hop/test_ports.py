"""Where engines listen: a pinned port, and the next one for the next engine of the node."""

from __future__ import annotations

import asyncio
import socket

from tests.hop.support import Engine
from tests.hop.test_dispatcher import run


def free_pair() -> int:
    """A port that is free together with the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def test_the_second_engine_of_a_node_takes_the_next_port():
    async def scenario():
        port = free_pair()
        engines = [Engine("one"), Engine("two")]
        taken = [(await engine.start(port))[1] for engine in engines]
        assert taken == [port, port + 1]
        await engines[0].stop()
        await asyncio.sleep(0.05)
        third = Engine("three")
        assert (await third.start(port))[1] == port
        for engine in (engines[1], third):
            await engine.stop()

    run(scenario())
