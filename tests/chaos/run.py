"""Streams under fire: every id is compared with a run that had no faults."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from headway.client import AsyncClient, Delivery, Delta, Finished, Sampling
from headway.errors import HeadwayRpcError
from tests.chaos.cluster import Cluster, Faults
from tests.e2e.reading import prompt
from tests.e2e.tiny_folder import write_tiny_folder

KINDS = 48
"""Different requests; every stream is one of them."""
WINDOW_S = 60.0


@dataclass
class Report:
    """failed: (request, error). wrong: request numbers whose ids differ. gaps_s: the longest gap of
    each stream that was moved. noticed_s: from a fault of an engine until a router has let go of
    it. Tokens lost, doubled or reordered all show as wrong ids."""

    kills: int
    stops: int
    streams: int = 0
    tokens: int = 0
    replays: int = 0
    preemptions: int = 0
    recomputed: int = 0
    wrong: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        gaps = sorted(self.gaps_s) or [0.0]
        return [
            f"faults: {self.kills} SIGKILL, {self.stops} SIGSTOP in {self.seconds:.0f} s",
            f"streams: {self.streams}, of them failed {len(self.failed)}, "
            f"with wrong ids {len(self.wrong)}; {self.tokens} tokens",
            f"moves to another engine: {self.replays}; recomputed "
            f"{100 * self.recomputed / max(1, self.tokens):.1f}% of the output tokens",
            f"an engine's loss was noticed after: median {_median(self.noticed_s):.2f} s, "
            f"worst {max(self.noticed_s, default=0.0):.2f} s",
            f"longest gap of moved streams: median {statistics.median(gaps):.2f} s, "
            f"P99 {gaps[int(0.99 * (len(gaps) - 1))]:.2f} s, worst {gaps[-1]:.2f} s",
            *(f"failed: {number}: {error}" for number, error in self.failed[:10]),
        ]


def sampling(number: int) -> Sampling:
    return Sampling(
        max_tokens=40 + (number * 37) % 260,
        temperature=0.0 if number % 2 else 1.0,
        top_k=(0, 40)[number % 4 == 2],
        frequency_penalty=0.5 if number % 5 == 0 else None,
        seed=number,
        ignore_eos=True,
    )


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


async def one_stream(client: AsyncClient, number: int, report: Report) -> list[int]:
    ids: list[int] = []
    longest = 0.0
    before = time.monotonic()
    delivery = Delivery(resume_window_s=WINDOW_S, priority=number % 3)
    events = client.generate(prompt(number), sampling(number), delivery=delivery)
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                if event.first_index != len(ids):
                    raise AssertionError(f"token {len(ids)} expected, {event.first_index} came")
                ids += event.token_ids
                now = time.monotonic()
                longest, before = max(longest, now - before), now
            elif isinstance(event, Finished):
                report.replays += event.replays
                report.preemptions += event.preemptions
                report.recomputed += event.recomputed_tokens
                if event.replays:
                    report.gaps_s.append(longest)
    return ids


async def scenario(
    kills: int,
    stops: int,
    concurrent: int,
    least: int,
    seed: int,
    pause_s: tuple[float, float] = (0.3, 1.0),
) -> Report:
    report = Report(kills, stops)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_folder(Path(scratch) / "tiny")
        async with Cluster(model) as cluster:
            async with AsyncClient(cluster.addresses[0]) as client:
                calm = Report(0, 0)
                reference = [await one_stream(client, n, calm) for n in range(KINDS)]
            began = time.monotonic()
            faults = Faults(cluster, kills, stops, seed, pause_s)
            storm = asyncio.create_task(faults.run())
            numbers = itertools.count()
            workers = [
                asyncio.create_task(
                    _keep_asking(cluster, w, storm, numbers, least, reference, report)
                )
                for w in range(concurrent)
            ]
            await storm
            await asyncio.gather(*workers)
            report.noticed_s = faults.noticed_s
            report.seconds = time.monotonic() - began
    return report


async def _keep_asking(
    cluster: Cluster,
    worker: int,
    storm: asyncio.Task[None],
    numbers: itertools.count[int],
    least: int,
    reference: list[list[int]],
    report: Report,
) -> None:
    """Streams one after the other, while there are faults and until there were enough."""
    chooser = random.Random(worker)
    target = cluster.target(worker % len(cluster.addresses))
    async with AsyncClient(target) as client:
        while not storm.done() or report.streams < least:
            next(numbers)
            kind = chooser.randrange(KINDS)
            report.streams += 1
            try:
                ids = await one_stream(client, kind, report)
            except (HeadwayRpcError, AssertionError) as error:
                report.failed.append((kind, f"{type(error).__name__}: {error}"))
                continue
            report.tokens += len(ids)
            if ids != reference[kind]:
                report.wrong.append(kind)
