"""Prompts to token ids, off the event loop.

A prompt of 100,000 tokens takes tens of milliseconds; on the loop every stream of the process
would pause for it. The tokenizer releases the interpreter lock while it works.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.core.errors import Overloaded
from cluster.core.outcome import Refusal
from cluster.gateway.config import Limits
from cluster.gateway.mapping import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from cluster.text.tokenizer import Tokenizer

LARGE_CHARS = 1 << 18
"""Texts from here on have a thread of their own. The tokenizer takes seconds for the longest that a
message has room for, and a gigabyte: two of them would be all that others could wait for."""
LARGE_QUEUE = 16


class EncodePool:
    """A few threads and a bounded queue in front of them; one and a short queue for large texts."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._retry_after_s = limits.retry_after_s
        self._usual = _Lane("tokenize", limits.tokenizer_threads, limits.tokenizer_queue)
        self._large = _Lane("tokenize-large", 1, min(LARGE_QUEUE, limits.tokenizer_queue))

    async def encode(self, prompt: Prompt, most: int) -> Sequence[int]:
        """The prompt's ids. Raises InvalidRequest (chat template), TooManyTokens (more than `most`,
        unless they came as ids), Overloaded (queue full)."""
        if isinstance(prompt, IdsPrompt):
            return prompt.ids
        lane = self._large if _chars(prompt) >= LARGE_CHARS else self._usual
        job = lane.submit(lambda: self._encode(prompt, most))
        if job is None:
            raise Overloaded(
                "too many prompts wait to be tokenised", self._retry_after_s, Refusal.TOKENIZER
            )
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Drop what is queued; a running job ends by itself."""
        self._usual.close()
        self._large.close()

    def _encode(self, prompt: TextPrompt | ChatPrompt, most: int) -> Sequence[int]:
        if isinstance(prompt, ChatPrompt):
            return self._tokenizer.encode_chat(prompt.messages, most)
        return self._tokenizer.encode(prompt.text, most=most)


class _Lane:
    """Threads and the queue in front of them."""

    def __init__(self, name: str, threads: int, queue: int) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        # Counts jobs in threads and queue. Released by the job's own end and not by its waiter:
        # a cancelled call leaves its job running.
        self._places = threading.Semaphore(threads + queue)

    def submit(self, work: Callable[[], Sequence[int]]) -> Future[Sequence[int]] | None:
        """None if the queue is full."""
        if not self._places.acquire(blocking=False):
            return None
        job = self._threads.submit(work)
        job.add_done_callback(lambda _: self._places.release())
        return job

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _chars(prompt: TextPrompt | ChatPrompt) -> int:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    return sum(len(message.content) for message in prompt.messages)
