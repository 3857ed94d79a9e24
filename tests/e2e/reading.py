"""Clients that read streams while things break, and what they saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.client import AsyncClient, Delivery, Delta, Finished, Sampling
from headway.errors import HeadwayRpcError

KINDS = 8
"""Different requests; every stream is one of them."""
WINDOW_S = 60.0
"""For so long a client tries to go on with a stream that it has lost."""


def sampling(number: int) -> Sampling:
    return Sampling(
        max_tokens=900 + (number * 97) % 400,
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
    replays: int = 0


async def read(target: str, number: int, window_s: float = WINDOW_S) -> Read:
    """One stream to its end. On a channel of its own: where routers share an address, the kernel
    deals connections out."""
    seen = Read(number)
    async with AsyncClient(target) as client:
        await follow(client, seen, window_s)
    return seen


async def follow(client: AsyncClient, seen: Read, window_s: float = WINDOW_S) -> None:
    """Write down in `seen` what comes, as it comes."""
    number, before = seen.number, time.monotonic()
    delivery = Delivery(resume_window_s=window_s)
    try:
        events = client.generate(prompt(number), sampling(number), delivery=delivery)
        async for event in events:
            if isinstance(event, Delta):
                if event.first_index != len(seen.ids):
                    seen.failure = f"token {event.first_index} after {len(seen.ids)}"
                seen.ids += event.token_ids
                now = time.monotonic()
                seen.longest_gap_s = max(seen.longest_gap_s, now - before)
                before = now
            elif isinstance(event, Finished):
                seen.engines = list(event.engine_ids)
                seen.replays = event.replays
                if event.completion_tokens != len(seen.ids):
                    seen.failure = f"{len(seen.ids)} tokens, told {event.completion_tokens}"
    except HeadwayRpcError as error:
        seen.failure = f"{type(error).__name__}: {error}"


class UnderWay:
    """Requests 0, 1, ... read at once, each on a channel of its own, and all of them in mid-stream:
    what is broken now, breaks them.

    A pause of fixed length would not do. How long a stream takes is the machine's affair, and a
    fault that comes after the last token is survived by anything.
    """

    ATTEMPTS = 10

    def __init__(self, target: str, count: int) -> None:
        self._clients = [AsyncClient(target) for _ in range(count)]
        self._seen: list[Read] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begun(self) -> None:
        """Every stream has tokens, and none has all of them. Where the last began too late for
        that, all begin again."""
        # A process that is busy with streams may take seconds to connect.
        await asyncio.gather(*(client.wait_ready(60.0) for client in self._clients))
        for _ in range(self.ATTEMPTS):
            self._start()
            while not self._over() and not all(seen.ids for seen in self._seen):
                await asyncio.sleep(0.005)
            if not self._over():
                return
            await self._all_over()
        raise AssertionError("a stream was over before all had begun, each time")

    async def ended(self, expected: Sequence[Read]) -> list[Read]:
        """All of them, once each has ended with the ids that its request has in `expected`."""
        if not self._tasks:
            self._start()
        await self._all_over()
        await asyncio.gather(*(client.close() for client in self._clients))
        assert [seen.ids for seen in self._seen] == [expected[s.number].ids for s in self._seen]
        return self._seen

    def _start(self) -> None:
        self._seen = [Read(number % KINDS) for number in range(len(self._clients))]
        self._tasks = [
            asyncio.create_task(follow(client, seen))
            for client, seen in zip(self._clients, self._seen, strict=True)
        ]

    async def _all_over(self) -> None:
        await asyncio.gather(*self._tasks)
        assert [seen.failure for seen in self._seen if seen.failure] == []

    def _over(self) -> bool:
        return any(task.done() for task in self._tasks)


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
    """Every request alone, without a fault."""
    return [await read(target, number) for number in range(KINDS)]


async def engine_ids(client: AsyncClient) -> set[str]:
    return {engine.engine_id for engine in (await client.status()).engines}


async def until_replaced(client: AsyncClient, before: set[str], within_s: float = 60.0) -> None:
    """Wait until one of these engines is gone and another is there in its place. Their number alone
    would not do: one that is dead counts until somebody has noticed."""
    deadline = time.monotonic() + within_s
    while len(there := await engine_ids(client)) != len(before) or len(there - before) != 1:
        assert time.monotonic() < deadline, f"of {sorted(before)} no one was replaced"
        await asyncio.sleep(0.2)
