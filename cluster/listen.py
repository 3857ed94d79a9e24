"""Ports of processes of which several may be on one node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

PORTS_TRIED = 64
"""So many replicas of a kind on one node have pinned ports; those beyond take any."""
STREAM_LIMIT = 64 << 10
"""asyncio's own."""

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen_near(
    serve: Serve, host: str, port: int, limit: int = STREAM_LIMIT
) -> asyncio.Server:
    """At the port, the next free one, or at last any; 0 is any at once. Raises OSError for a host
    that cannot be listened on."""
    pinned = range(port, min(port + PORTS_TRIED, 1 << 16)) if port else ()
    for candidate in pinned:
        try:
            return await asyncio.start_server(serve, host, candidate, limit=limit)
        except OSError as error:
            logger.debug("port %d of %s: %s", candidate, host, error)
    return await asyncio.start_server(serve, host, 0, limit=limit)
