from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

import pytest

from cluster.metrics import http
from cluster.metrics.http import MetricsServer, Page
from cluster.metrics.targets import Target, discovery


def broken() -> str:
    raise RuntimeError("cannot")


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def serving(test: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = MetricsServer(
            {"/metrics": Page("text/x", lambda: "é\n"), "/bad": Page("t", broken)}
        )
        port = await server.start("127.0.0.1", 0)
        try:
            await test(port)
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1", 200, "é\n".encode()),
        (b"GET /metrics?x=1 HTTP/1.0", 200, "é\n".encode()),
        (b"HEAD /metrics HTTP/1.1", 200, b""),
        (b"GET /other HTTP/1.1", 404, b"there are: /bad, /metrics\n"),
        (b"POST /metrics HTTP/1.1", 405, b"GET or HEAD, please\n"),
        (b"GET /bad HTTP/1.1", 500, b"see the log\n"),
        (b"\xff\xfe", 405, b"GET or HEAD, please\n"),
    ],
)
def test_answers(request_line: bytes, status: int, body: bytes):
    async def test(port: int) -> None:
        head, _, found = (await ask(port, request_line + b"\r\nA: b\r\n\r\n")).partition(
            b"\r\n\r\n"
        )
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert found == body
        if request_line.startswith(b"HEAD"):
            assert b"Content-Length: 3\r\n" in head

    serving(test)


def test_too_much_is_hung_up_on():
    async def test(port: int) -> None:
        assert await ask(port, b"GET /" + b"x" * (http.MAX_REQUEST_BYTES + 1000)) == b""
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    serving(test)


def test_who_says_nothing_does_not_hold_others_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)

    async def test(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n") == b"", "beyond the limit"
        for reader, _ in silent:
            assert await asyncio.wait_for(reader.read(), 2) == b""
        assert b" 200 " in await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        for _, writer in silent:
            writer.close()

    serving(test)


def test_the_next_free_port_is_taken():
    async def run() -> None:
        first, second = MetricsServer({}), MetricsServer({})
        port = await first.start("127.0.0.1", 0)
        try:
            assert await second.start("127.0.0.1", port) > port
        finally:
            await second.stop()
            await first.stop()

    asyncio.run(run())


def test_an_address_that_is_not_ours_is_an_error(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)

    async def run() -> None:
        with pytest.raises(OSError, match=r"192\.0\.2\.1"):
            await MetricsServer({}).start("192.0.2.1", 9464)

    asyncio.run(run())


def test_discovery_names_everybody_once():
    routers = [Target("h:2", "router", "r1"), Target("h:1", "router", "r0")]
    engines = [
        Target("h:3", "engine", "e0"),
        Target("h:3", "engine", "e0"),
        Target("", "engine", "x"),
    ]
    found = json.loads(discovery([*routers, *engines]))
    assert found == [
        {"targets": ["h:3"], "labels": {"role": "engine", "id": "e0"}},
        {"targets": ["h:1"], "labels": {"role": "router", "id": "r0"}},
        {"targets": ["h:2"], "labels": {"role": "router", "id": "r1"}},
    ]
