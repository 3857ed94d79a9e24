"""Reads streams on a host until its standard input ends, then prints what it saw as JSON.

usage: reader.py TARGET[,TARGET...] reference
       reader.py TARGET[,TARGET...] READERS WINDOW_S
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tests.e2e.reading import Read, keep_reading, reference


async def main(targets: Sequence[str], readers: int, window_s: float) -> list[Read]:
    done: list[Read] = []
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(keep_reading(targets, worker, readers, stop, done, window_s))
        for worker in range(readers)
    ]
    print("reading", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await asyncio.gather(*tasks)
    return done


if __name__ == "__main__":
    targets, what, *window = sys.argv[1].split(","), *sys.argv[2:]
    if what == "reference":
        work = reference(targets[0])
    else:
        work = main(targets, int(what), float(window[0]))
    print(json.dumps([asdict(seen) for seen in asyncio.run(work)]), flush=True)
