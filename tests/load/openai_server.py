"""A server of OpenAI's completions protocol, with a known gap between its tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

GAP_S = 0.004
REFUSED, NONSENSE = 7, 8
NUMBERS = web.AppKey("numbers", Iterator[int])


async def _completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    number = next(request.app[NUMBERS])
    if number == REFUSED:
        return web.Response(status=503)
    if number == NONSENSE:
        return web.Response(text='data: ["no event"]\n\n')
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for place in range(body["max_tokens"]):
        await asyncio.sleep(GAP_S)
        event = {"choices": [{"text": f" word{place}"}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": len(body["prompt"].split())}
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@contextmanager
def openai_server() -> Iterator[str]:
    """Yields its URL. Of its requests REFUSED is refused, and NONSENSE gets no event."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), {}

    async def start() -> web.AppRunner:
        app = web.Application()
        app[NUMBERS] = itertools.count()
        app.router.add_post("/v1/completions", _completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found["port"] = runner.addresses[0][1]
        ready.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{found['port']}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
