"""The comparison of `bench relief` with real engines: processes, TCP hop, a tiny real model.

Four engines whose pools are small; requests are dealt out 40/30/20/10 on purpose. Who is preempted
goes on at home, or at an engine that has room.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from cluster.bench.tiny_model import VOCAB, write_tiny_model
from cluster.core.sampling import SamplingParams, counter_uniform
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.fleet.placements.base import Placement
from cluster.fleet.placements.least import LeastOutstanding
from cluster.fleet.relief import ReliefSettings
from cluster.hop.link import LinkSettings
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.router.stream import GenerationRequest, TokenStream
from cluster.sim.fleetchoice import Skewed
from cluster.sim.workload import Lengths

ENGINES = 4
STEP_MS = 10.0
NUM_BLOCKS = 220
CONTEXT = 2048
PROMPT = 30
OUTPUT = Lengths(250, 1.0)
MAX_OUTPUT = 1600
START_S = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Live:
    """rate: requests per second for all engines. share: see Skewed; () places by load."""

    name: str
    rate: float
    shares: tuple[float, ...] = ()
    num_blocks: int = NUM_BLOCKS
    engines: int = ENGINES


CASES = (
    Live("skewed 40/30/20/10", 14.0, (0.4, 0.3, 0.2, 0.1)),
    Live("balanced", 14.0),
    Live("one engine", 3.5, num_blocks=NUM_BLOCKS // 2, engines=1),
)
WAYS = {"at home": ReliefSettings(max_moves=0), "cluster-wide": ReliefSettings()}


@dataclass
class Found:
    """One run. stalls_s: longest gap of each stream that lost its blocks, or was moved."""

    stalls_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    moves: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def draws(seed: int) -> Iterator[float]:
    index = 0
    while True:
        index += 1
        yield counter_uniform(seed, index)


def requests(case: Live, count: int, seed: int) -> list[tuple[float, GenerationRequest]]:
    """(seconds after the start, request): Poisson arrivals."""
    uniform = draws(seed).__next__
    at_s, asked = 0.0, []
    for number in range(count):
        at_s -= math.log(max(uniform(), 1e-12)) / case.rate
        prompt = tuple(3 + int(uniform() * (VOCAB - 3)) for _ in range(PROMPT))
        output = min(OUTPUT.draw(uniform), MAX_OUTPUT)
        sampling = SamplingParams(max_tokens=output, temperature=0.0, seed=number)
        asked.append((at_s, GenerationRequest(f"r{number}", prompt, sampling)))
    return asked


async def measure(case: Live, relief: ReliefSettings, model: Path, count: int, seed: int) -> Found:
    secret = secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        addresses = set()
        for number in range(case.engines):
            process = await _engine(f"engine-{number}", model, case.num_blocks, secret)
            stack.push_async_callback(_end, process)
            addresses.add(("127.0.0.1", await _port(process)))
        gate = GateSettings(max_queued=count, queue_timeout_s=600.0)
        settings = DispatcherSettings(max_streams=count, fleet=FleetSettings(gate, relief))
        placement: Placement = Skewed(case.shares, seed) if case.shares else LeastOutstanding()
        dispatcher = Dispatcher(LinkSettings("bench", secret), settings, placement)
        stack.push_async_callback(dispatcher.close)
        await dispatcher.set_engines(addresses)
        while len(dispatcher.engines()) < case.engines:
            await asyncio.sleep(0.05)
        return await _run(dispatcher, requests(case, count, seed))


async def _run(dispatcher: Dispatcher, asked: Sequence[tuple[float, GenerationRequest]]) -> Found:
    found, began = Found(), time.monotonic()

    async def one(at_s: float, request: GenerationRequest) -> None:
        await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
        await _read(await dispatcher.open(request), found)

    await asyncio.gather(*(one(at_s, request) for at_s, request in asked))
    found.seconds = time.monotonic() - began
    found.moves = dispatcher.fleet.moved
    return found


async def _read(stream: TokenStream, found: Found) -> None:
    first = last = longest = 0.0
    count = 0
    try:
        while True:
            batch = await stream.next()
            now = time.monotonic()
            if count == 0:
                first = now
            else:
                longest = max(longest, now - last)
            last = now
            count += len(batch.token_ids)
            if batch.finish is not None:
                break
    finally:
        stream.leave()
    timing = stream.timing
    found.tokens += count
    found.preemptions += timing.preemptions
    if count > 1:
        found.tpot_s.append((last - first) / (count - 1))
    if timing.preemptions or timing.replays:
        found.stalls_s.append(longest)


async def _engine(name: str, model: Path, blocks: int, secret: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.bench.tiny_engine"),
        *(name, str(model), str(blocks), str(STEP_MS), secret),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def _port(process: asyncio.subprocess.Process) -> int:
    if process.stdout is None:
        raise RuntimeError("the engine's output is not read")
    return int(await asyncio.wait_for(process.stdout.readline(), START_S))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 10.0)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()


def run(count: int, rounds: int, say: Say) -> dict[str, dict[str, list[Found]]]:
    """Every case in both ways, by turns; prints the median of the rounds."""
    results: dict[str, dict[str, list[Found]]] = {}
    say(
        f"{'case':<19} {'preempted goes on':<18} {'preempt':>7} {'moves':>6} {'stall P50':>10} "
        f"{'worst s':>8} {'TPOT P99':>9} {'tok/s':>7}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "tiny", CONTEXT)
        for case in CASES:
            ways: dict[str, list[Found]] = {name: [] for name in WAYS}
            for turn in range(rounds):
                for name, relief in WAYS.items():
                    ways[name].append(asyncio.run(measure(case, relief, model, count, turn)))
            for name, runs in ways.items():
                say(_line(case.name, name, runs))
            results[case.name] = ways
    return results


def _line(case: str, way: str, runs: Sequence[Found]) -> str:
    def of(value: Callable[[Found], float]) -> float:
        return median(value(run) for run in runs)

    def p99(values: Sequence[float]) -> float:
        return quantiles(values, n=100)[98] if len(values) > 1 else 0.0

    return (
        f"{case:<19} {way:<18} {of(lambda f: f.preemptions):>7.0f} {of(lambda f: f.moves):>6.0f} "
        f"{of(lambda f: median(f.stalls_s) if f.stalls_s else 0.0):>10.2f} "
        f"{of(lambda f: max(f.stalls_s, default=0.0)):>8.2f} "
        f"{of(lambda f: 1e3 * p99(f.tpot_s)):>9.1f} {of(lambda f: f.tokens_per_s):>7.0f}"
    )
