"""R53: tokenising leaves the loop free, and its queue is bounded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.core.errors import InvalidRequest, Overloaded
from cluster.gateway.config import Limits
from cluster.gateway.encoding import LARGE_CHARS, EncodePool
from cluster.gateway.mapping import ChatPrompt, IdsPrompt, TextPrompt
from cluster.text.chat import ChatMessage
from cluster.text.tokenizer import Tokenizer
from cluster.text.toolong import TooManyTokens
from tests.wire.wire_support import in_loop

MOST = 1 << 20


class SlowTokenizer(Tokenizer):
    """The real one behind a gate."""

    gate: threading.Event

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        assert self.gate.wait(10)
        return super().encode(text, add_special, most)


@pytest.fixture
def slow(tokenizer: Tokenizer) -> SlowTokenizer:
    gated = SlowTokenizer.__new__(SlowTokenizer)
    gated.__dict__.update(tokenizer.__dict__)
    gated.gate = threading.Event()
    return gated


@in_loop
async def test_kinds_of_prompts(tokenizer: Tokenizer) -> None:
    pool = EncodePool(tokenizer, Limits())
    assert await pool.encode(TextPrompt("abc"), MOST) == tokenizer.encode("abc")
    turns = (ChatMessage("user", "hi"),)
    assert await pool.encode(ChatPrompt(turns), MOST) == tokenizer.encode_chat(turns)
    assert await pool.encode(IdsPrompt((1, 2)), MOST) == (1, 2)
    with pytest.raises(TooManyTokens, match=str(len(tokenizer.encode("abc")))):
        await pool.encode(TextPrompt("abc"), len(tokenizer.encode("abc")) - 1)
    with pytest.raises(TooManyTokens, match=str(len(tokenizer.encode_chat(turns)))):
        await pool.encode(ChatPrompt(turns), len(tokenizer.encode_chat(turns)) - 1)
    with pytest.raises(InvalidRequest):
        await pool.encode(ChatPrompt((ChatMessage("Bad Role", "hi"),)), MOST)
    pool.close()


@in_loop
async def test_the_loop_goes_on(tokenizer: Tokenizer) -> None:
    pool = EncodePool(tokenizer, Limits(tokenizer_threads=1))
    words = "the quick brown fox jumps over the lazy dog " * 20_000
    job = asyncio.ensure_future(pool.encode(TextPrompt(words), MOST))
    turns = 0
    while not job.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(job.result()) > 100_000
    # Hundreds on an idle machine, one or two if the tokenizer kept the interpreter to itself.
    assert turns > 20
    pool.close()


@in_loop
async def test_a_full_queue_refuses_and_recovers(slow: SlowTokenizer) -> None:
    limits = Limits(tokenizer_threads=1, tokenizer_queue=2, retry_after_s=0.5)
    pool = EncodePool(slow, limits)
    jobs = [asyncio.ensure_future(pool.encode(TextPrompt("a"), MOST)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await pool.encode(TextPrompt("b"), MOST)
    assert caught.value.retry_after_s == 0.5
    # Ids need no thread, so they are not held up either.
    assert await pool.encode(IdsPrompt((5,)), MOST) == (5,)
    slow.gate.set()
    await asyncio.gather(*jobs)
    assert await pool.encode(TextPrompt("b"), MOST) == slow.encode("b")
    pool.close()


@in_loop
async def test_a_cancelled_call_gives_its_place_back_when_its_job_is_over(
    slow: SlowTokenizer,
) -> None:
    pool = EncodePool(slow, Limits(tokenizer_threads=1, tokenizer_queue=1))
    running, queued = (asyncio.ensure_future(pool.encode(TextPrompt("a"), MOST)) for _ in range(2))
    await asyncio.sleep(0.02)
    running.cancel()
    queued.cancel()
    await asyncio.sleep(0)
    # The queued job is gone, the running one still holds its thread.
    replaced = asyncio.ensure_future(pool.encode(TextPrompt("c"), MOST))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pool.encode(TextPrompt("d"), MOST)
    slow.gate.set()
    assert await replaced == slow.encode("c")
    pool.close()


@in_loop
async def test_large_texts_wait_for_each_other_and_nobody_for_them(slow: SlowTokenizer) -> None:
    pool = EncodePool(slow, Limits(tokenizer_threads=1, tokenizer_queue=1))
    large = (TextPrompt("a" * LARGE_CHARS), ChatPrompt((ChatMessage("user", "a" * LARGE_CHARS),)))
    jobs = [asyncio.ensure_future(pool.encode(prompt, MOST)) for prompt in large]
    await asyncio.sleep(0.02)
    with pytest.raises(Overloaded):
        await pool.encode(large[0], MOST)
    turn = (ChatMessage("user", "hi"),)
    assert await pool.encode(ChatPrompt(turn), MOST) == slow.encode_chat(turn)
    assert not any(job.done() for job in jobs)
    slow.gate.set()
    text, chat = await asyncio.gather(*jobs)
    assert len(text) == LARGE_CHARS < len(chat)
    pool.close()
