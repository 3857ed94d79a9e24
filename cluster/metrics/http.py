"""A small HTTP server for scrapes, in the asyncio loop of whoever is measured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cluster.listen import listen_near

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32


class Page(NamedTuple):
    """What a path answers. body: called for every request, in the loop; quick."""

    content_type: str
    body: Callable[[], str]


class MetricsServer:
    """GET and HEAD of a few paths, one request per connection. Reads nothing but the request line,
    and knows no secrets: who may reach it is a matter of the interface it listens on."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = dict(pages)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen at `port`, or at the next free one; 0 for any. Returns the port."""
        self._server = await listen_near(self._serve, host, port, MAX_REQUEST_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            for writer in self._open:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if len(self._open) <= MAX_CONNECTIONS:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_TIMEOUT_S)
                writer.write(self._answer(head.split(b"\r\n", 1)[0]))
                await asyncio.wait_for(writer.drain(), REQUEST_TIMEOUT_S)
        except (
            OSError,
            asyncio.TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ) as error:
            logger.debug("a scrape came to nothing: %s", type(error).__name__)
        finally:
            self._open.discard(writer)
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    def _answer(self, request_line: bytes) -> bytes:
        method, _, rest = request_line.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        page = self._pages.get(path)
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", "GET or HEAD, please\n")
        if page is None:
            known = ", ".join(sorted(self._pages))
            return _response("404 Not Found", "text/plain", f"there are: {known}\n")
        try:
            body = page.body()
        except Exception:
            logger.exception("%s cannot be told", path)
            return _response("500 Internal Server Error", "text/plain", "see the log\n")
        whole = _response("200 OK", page.content_type, body)
        return whole if method == "GET" else whole[: whole.index(b"\r\n\r\n") + 4]


def _response(status: str, content_type: str, text: str) -> bytes:
    body = text.encode("utf-8")
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
