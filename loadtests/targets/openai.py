"""Any server of the OpenAI completions protocol, under the same schedule and metrics.

Prompts go out as text, cut to a number of words that makes about the asked number of tokens; what
the server counted is in the records. Such servers name no emit time, so wire lag stays unjudged,
and one event may hold several tokens, of which only the server's `usage` tells the number.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import aiohttp

from cluster.core.errors import HeadwayError
from loadtests.prompts import PromptMaker, corpus_text
from loadtests.scenario import PlannedRequest
from loadtests.targets.base import Sink, TargetSpec, Units

WORDS_PER_TOKEN = 0.8
"""Of English under the vocabularies in use, punctuation included."""
CONNECT_TIMEOUT_S = 30.0


class OpenAiTarget:
    """address: http://HOST:PORT, with or without /v1 at its end; plain HOST:PORT means http."""

    def __init__(self, spec: TargetSpec) -> None:
        if not spec.model:
            raise HeadwayError("an openai target needs --model NAME")
        base = spec.address if "://" in spec.address else f"http://{spec.address}"
        self._url = base.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._spec = spec

    async def open(self, seed: int) -> None:
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self._spec.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        self._prompts = PromptMaker(corpus_text().split(), seed, WORDS_PER_TOKEN)

    def new_units(self, request: PlannedRequest) -> Units:
        return self._prompts.make(request)

    async def send(self, prompt: Units, request: PlannedRequest, sink: Sink) -> None:
        body = {
            "model": self._spec.model,
            "prompt": " ".join(prompt),
            "max_tokens": request.output_length,
            # No seed: vLLM 0.32's CPU engine dies of one that meets a prompt cut into chunks.
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Known to vLLM, SGLang and llama.cpp; others end where the model ends.
            "ignore_eos": True,
        }
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    sink.record.error = f"HTTP_{response.status}"
                    return
                await self._read(response, sink)
        except aiohttp.ClientError as error:
            sink.record.error = type(error).__name__
        except asyncio.TimeoutError:
            sink.record.error = "TIMEOUT"
        except (ValueError, AttributeError, TypeError):
            # Not an event of this protocol; what else the server sends is not looked at.
            sink.record.error = "BAD_EVENT"

    async def _read(self, response: aiohttp.ClientResponse, sink: Sink) -> None:
        record, done = sink.record, False
        async for raw in response.content:
            now = time.perf_counter()
            if not raw.startswith(b"data:"):
                continue
            data = raw[5:].strip()
            if data == b"[DONE]":
                done = True
                break
            event = json.loads(data)
            for choice in event.get("choices") or ():
                text = choice.get("text") or ""
                if text:
                    sink.delta(now, record.tokens, 1)
                    sink.output += text.split()
            usage: dict[str, Any] = event.get("usage") or {}
            if usage.get("completion_tokens"):
                record.prompt_tokens = usage.get("prompt_tokens", 0)
                # Several tokens may have come as one event: then the server's count is the truth.
                record.tokens = max(record.tokens, usage["completion_tokens"])
                record.expected = record.tokens
        if not done:
            record.error = "NO_DONE"
        elif record.first_s < 0:
            record.error = "NO_TOKENS"

    async def status(self) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        await self._session.close()
