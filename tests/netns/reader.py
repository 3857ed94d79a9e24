"""Reads streams on a host until its standard input ends, then prints what it saw as JSON.

usage: reader.py TARGET[,TARGET...] READERS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from headway.client import AsyncClient, Delivery, Delta, Finished, Sampling
from headway.errors import HeadwayRpcError

KINDS = 24


def sampling(number: int) -> Sampling:
    return Sampling(
        max_tokens=200 + (number * 97) % 600,
        temperature=float(number % 2),
        seed=number,
        ignore_eos=True,
    )


def prompt(number: int) -> list[int]:
    return [3 + (number * 31 + i * 17) % 300 for i in range(1 + (number * 11) % 120)]


async def read(target: str, number: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"number": number, "ids": [], "failure": "", "gap_s": 0.0, "engines": []}
    before = time.monotonic()
    try:
        async with AsyncClient(target) as client:
            delivery = Delivery(resume_window_s=60.0)
            stream = client.generate(prompt(number), sampling(number), delivery=delivery)
            async for event in stream:
                if isinstance(event, Delta):
                    if event.first_index != len(seen["ids"]):
                        seen["failure"] = f"token {event.first_index} after {len(seen['ids'])}"
                    seen["ids"] += event.token_ids
                    now = time.monotonic()
                    seen["gap_s"] = max(seen["gap_s"], now - before)
                    before = now
                elif isinstance(event, Finished):
                    seen["engines"] = list(event.engine_ids)
    except HeadwayRpcError as error:
        seen["failure"] = f"{type(error).__name__}: {error}"
    return seen


async def main(targets: list[str], readers: int) -> None:
    done: list[dict[str, Any]] = []
    stop = asyncio.Event()

    async def keep_reading(worker: int) -> None:
        # Each prefers another node; the others are where it goes on when that one is lost.
        order = targets[worker % len(targets) :] + targets[: worker % len(targets)]
        number = worker
        while not stop.is_set():
            done.append(await read("ipv4:" + ",".join(order), number % KINDS))
            number += readers

    tasks = [asyncio.create_task(keep_reading(worker)) for worker in range(readers)]
    print("reading", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await asyncio.gather(*tasks)
    print(json.dumps(done), flush=True)


async def reference(target: str) -> None:
    print(json.dumps([await read(target, number) for number in range(KINDS)]), flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "reference":
        asyncio.run(reference(sys.argv[1]))
    else:
        asyncio.run(main(sys.argv[1].split(","), int(sys.argv[2])))
