"""Prompts to token ids, off the event loop.

A prompt of 100,000 tokens takes tens of milliseconds; on the loop every stream of the process
would pause for it. The tokenizer releases the interpreter lock while it works.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cluster.core.errors import Overloaded
from cluster.core.outcome import Refusal
from cluster.gateway.config import Limits
from cluster.gateway.mapping import ChatPrompt, IdsPrompt, Prompt
from cluster.text.tokenizer import Tokenizer


class EncodePool:
    """A few threads and a bounded queue in front of them."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._retry_after_s = limits.retry_after_s
        self._threads = ThreadPoolExecutor(limits.tokenizer_threads, "tokenize")
        # Counts jobs in threads and queue. Released by the job's own end and not by its waiter:
        # a cancelled call leaves its job running.
        self._places = threading.Semaphore(limits.tokenizer_threads + limits.tokenizer_queue)

    async def encode(self, prompt: Prompt, most: int) -> Sequence[int]:
        """The prompt's ids. Raises InvalidRequest (chat template), TooManyTokens (more than `most`,
        unless they came as ids), Overloaded (queue full)."""
        if isinstance(prompt, IdsPrompt):
            return prompt.ids
        if not self._places.acquire(blocking=False):
            raise Overloaded(
                "too many prompts wait to be tokenised", self._retry_after_s, Refusal.TOKENIZER
            )
        job = self._threads.submit(self._encode, prompt, most)
        job.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Drop what is queued; a running job ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: Prompt, most: int) -> Sequence[int]:
        if isinstance(prompt, ChatPrompt):
            return self._tokenizer.encode_chat(prompt.messages, most)
        if isinstance(prompt, IdsPrompt):
            return prompt.ids
        return self._tokenizer.encode(prompt.text, most=most)
