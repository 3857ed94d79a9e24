"""A gateway in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.gateway.config import GatewayConfig
from cluster.text.tokenizer import Tokenizer
from tests.wire.wire_support import Script, Wire, gateway


@contextmanager
def live_gateway(
    tokenizer: Tokenizer, script: Script, config: GatewayConfig | None = None
) -> Iterator[Wire]:
    """Runs until the block is left. Its script may be changed from outside between requests."""
    started: threading.Event = threading.Event()
    found: list[Wire] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with gateway(tokenizer, script, config) as wire:
            found.append(wire)
            done = asyncio.Event()
            loops.append((asyncio.get_running_loop(), done))
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="gateway")
    thread.start()
    try:
        assert started.wait(10), "the gateway did not start"
        yield found[0]
    finally:
        if loops:
            loop, done = loops[0]
            loop.call_soon_threadsafe(done.set)
        thread.join(10)
