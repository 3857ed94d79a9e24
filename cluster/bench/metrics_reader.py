"""Reads streams at the port that each line of standard input names, and says how many tokens came.

usage: python -m cluster.bench.metrics_reader STREAMS TOKENS
"""

from __future__ import annotations

import asyncio
import sys

from headway.client import AsyncClient, Delta, Sampling


async def read(client: AsyncClient, tokens: int) -> int:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    count = 0
    async for event in client.generate([5, 6, 7], sampling):
        if isinstance(event, Delta):
            count += len(event.token_ids)
    return count


async def all_of(port: int, streams: int, tokens: int) -> int:
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        return sum(await asyncio.gather(*(read(client, tokens) for _ in range(streams))))


def main() -> None:
    streams, tokens = map(int, sys.argv[1:])
    for line in sys.stdin:
        print(asyncio.run(all_of(int(line), streams, tokens)), flush=True)


if __name__ == "__main__":
    main()
