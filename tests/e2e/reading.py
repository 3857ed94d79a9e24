"""Clients that read streams while things break, and what they saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.client import AsyncClient, Delivery, Delta, Finished, Sampling
from headway.errors import HeadwayRpcError

KINDS = 12
"""Different requests; every stream is one of them."""
WINDOW_S = 60.0
"""For so long a client tries to go on with a stream that it has lost."""


def sampling(number: int) -> Sampling:
    return Sampling(
        max_tokens=150 + (number * 97) % 400,
        temperature=float(number % 2),
        seed=number,
        ignore_eos=True,
    )


def prompt(number: int) -> list[int]:
    return [3 + (number * 31 + i * 17) % 300 for i in range(1 + (number * 11) % 120)]


@dataclass
class Read:
    """One stream as its client saw it."""

    number: int
    ids: list[int] = field(default_factory=list)
    longest_gap_s: float = 0.0
    failure: str = ""
    engines: list[str] = field(default_factory=list)


async def read(target: str, number: int, window_s: float = WINDOW_S) -> Read:
    """On a channel of its own: where routers share an address, the kernel deals connections out."""
    seen, before = Read(number), time.monotonic()
    delivery = Delivery(resume_window_s=window_s)
    try:
        async with AsyncClient(target) as client:
            stream = client.generate(prompt(number), sampling(number), delivery=delivery)
            async for event in stream:
                if isinstance(event, Delta):
                    if event.first_index != len(seen.ids):
                        seen.failure = f"token {event.first_index} after {len(seen.ids)}"
                    seen.ids += event.token_ids
                    now = time.monotonic()
                    seen.longest_gap_s = max(seen.longest_gap_s, now - before)
                    before = now
                elif isinstance(event, Finished):
                    seen.engines = list(event.engine_ids)
                    if event.completion_tokens != len(seen.ids):
                        seen.failure = f"{len(seen.ids)} tokens, told {event.completion_tokens}"
    except HeadwayRpcError as error:
        seen.failure = f"{type(error).__name__}: {error}"
    return seen


async def keep_reading(
    targets: Sequence[str],
    worker: int,
    workers: int,
    stop: asyncio.Event,
    done: list[Read],
    window_s: float = WINDOW_S,
) -> None:
    """Streams one after the other. Every worker prefers another of the targets; the others are
    where it goes on when that one is lost."""
    first = worker % len(targets)
    order = [*targets[first:], *targets[:first]]
    target = order[0] if len(order) == 1 else "ipv4:" + ",".join(order)
    number = worker
    while not stop.is_set():
        done.append(await read(target, number % KINDS, window_s))
        number += workers


async def reference(target: str) -> list[Read]:
    """Every request alone."""
    return [await read(target, number) for number in range(KINDS)]
