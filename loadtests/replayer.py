"""Sends a shard of a schedule when it is due, whatever the server does (open loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from loadtests.collect import ChildFacts, ServerSample
from loadtests.histograms import Histograms
from loadtests.records import Record
from loadtests.scenario import PlannedRequest, Scenario
from loadtests.targets.base import Lags, Sink, Target, Units

CPU_WINDOW_S = 2.0
STATUS_PERIOD_S = 1.0


class Replayer:
    """One run of one shard. done: called with every finished record, in the event loop."""

    def __init__(
        self,
        target: Target,
        scenario: Scenario,
        shard: Sequence[PlannedRequest],
        done: Callable[[Record], None],
    ) -> None:
        self._target = target
        self._scenario = scenario
        self._rows = shard
        self._done = done
        self._lags = Lags()
        self._histories: dict[tuple[int, int], asyncio.Future[Units]] = {}
        self._start = 0.0
        self._unix_offset = 0.0
        self.server: list[ServerSample] = []

    async def run(self, shard: int, start_unix_s: float, users: int = 0) -> ChildFacts:
        """Until the last answer. users: of a closed loop; 0 keeps to the schedule."""
        self._unix_offset = time.time() - time.perf_counter()
        self._start = start_unix_s - self._unix_offset
        # Prompts are made before the run: making them takes time that the first tokens need.
        units = [self._target.new_units(row) for row in self._rows]
        await asyncio.sleep(max(0.0, self._start - time.perf_counter()))
        watch = _CpuWatch()
        helpers = [asyncio.create_task(watch.run())]
        if shard == 0:
            helpers.append(asyncio.create_task(self._watch_server()))
        pairs = zip(self._rows, units, strict=True)
        await (self._closed(pairs, users) if users else self._open(pairs))
        share, peak, wall_s = watch.result()
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        if shard == 0:
            await self._sample_server()
        skew = min(self._lags.wire, default=0.0)
        return ChildFacts(shard, len(self._rows), wall_s, share, peak, skew)

    def extra_histograms(self) -> dict[str, str]:
        """What the records do not tell: lags and emitted gaps of every token."""
        histograms = Histograms()
        fastest = min(self._lags.wire, default=0.0)
        for lag in self._lags.wire:
            histograms["wire lag"].add_seconds(lag - fastest)
        for gap in self._lags.emitted:
            histograms["ITL emitted"].add_seconds(gap)
        encoded = histograms.encode()
        return {name: encoded[name] for name in ("wire lag", "ITL emitted")}

    async def _open(self, pairs: Iterator[tuple[PlannedRequest, Units]]) -> None:
        tasks = []
        for row, units in pairs:
            delay = self._start + row.at_s - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(self._one(row, units, row.at_s)))
        await asyncio.gather(*tasks)

    async def _closed(self, pairs: Iterator[tuple[PlannedRequest, Units]], users: int) -> None:
        async def user() -> None:
            for row, units in pairs:
                await self._one(row, units, self._now())

        await asyncio.gather(*(user() for _ in range(users)))

    async def _one(self, row: PlannedRequest, units: Units, at_s: float) -> None:
        history: asyncio.Future[Units] = asyncio.get_running_loop().create_future()
        prompt = units
        if row.session >= 0:
            self._histories[row.session, row.turn] = history
        if row.turn > 0:
            prompt = await self._histories.pop((row.session, row.turn - 1)) + units
            # A user answers only what he has read: a turn arrives no earlier than that.
            at_s = max(at_s, self._now())
        record = Record(row.number, row.kind, row.tenant, at_s, at_s < self._scenario.warmup_s)
        record.priority = row.priority
        sink = Sink(record, self._start, self._unix_offset, self._lags)
        record.sent_s = self._now()
        await self._target.send(prompt, row, sink)
        record.done_s = self._now()
        history.set_result(prompt + sink.output)
        self._done(record)

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _watch_server(self) -> None:
        while True:
            await self._sample_server()
            await asyncio.sleep(STATUS_PERIOD_S)

    async def _sample_server(self) -> None:
        engines = await self._target.status()
        if engines:
            self.server.append(ServerSample(round(self._now(), 3), engines))


class _CpuWatch:
    """Processor time of the event loop's thread: the part of a client that gets too slow."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.thread_time()
        self._peak = 0.0

    async def run(self) -> None:
        wall, cpu = self._began
        while True:
            await asyncio.sleep(CPU_WINDOW_S)
            now, used = time.perf_counter(), time.thread_time()
            self._peak = max(self._peak, (used - cpu) / (now - wall))
            wall, cpu = now, used

    def result(self) -> tuple[float, float, float]:
        """Share over the whole time, share of the busiest window, seconds."""
        wall = max(1e-9, time.perf_counter() - self._began[0])
        share = (time.thread_time() - self._began[1]) / wall
        return share, max(share, self._peak), wall
