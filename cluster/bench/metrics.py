"""What metrics cost a router and an engine: with and without, in turns within one run.

Router: CPU time of its loop's thread (gateway, dispatcher, its end of the hop) per token that
clients in another process read over gRPC. Engine: CPU time of its two threads (steps, its end of
the hop) per step, with an executor that costs nothing. Both kinds run side by side in this process
and are used alternately. Machines waver by more than metrics cost, so what they add is also
measured by itself: the calls that a token or a step makes, and a scrape every 5 s.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from cluster.actors.loop_thread import LoopThread
from cluster.bench.echo import EchoExecutor
from cluster.core.outcome import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.engine.loop import NO_OBSERVER
from cluster.gateway.config import GatewayConfig
from cluster.gateway.server import GatewayServer, build_server
from cluster.hop.link import LinkSettings
from cluster.hop.service import EngineOptions, EngineService
from cluster.metrics.board import RouterBoard
from cluster.metrics.router import NoMeter, RouterMeter
from cluster.router.dispatcher import Dispatcher
from cluster.router.stream import GenerationRequest
from cluster.text.tokenizer import Tokenizer

LIMIT = 0.02
STREAMS = 16
OUTPUT = 100
STEP_S = 0.005
SCRAPE_PERIOD_S = 5.0
SECRET = "bench"
CALLS = 100_000


@dataclass(frozen=True, slots=True)
class Cost:
    """without_us, with_us: CPU per token or step, medians over rounds. low, high: what metrics add
    as a share, the middle half of the pairs of rounds; noise: how far the same half is from nothing
    when the second of a pair is without metrics as well. added: the share of added_us, which was
    measured by itself, scrapes included."""

    what: str
    without_us: float
    with_us: float
    low: float
    high: float
    noise: float
    added_us: float

    @property
    def added(self) -> float:
        return self.added_us / self.without_us

    @property
    def holds(self) -> bool:
        """Under the limit by itself, and the pairs do not say otherwise beyond their noise."""
        return self.added < LIMIT and self.low < LIMIT + self.noise


class Bench(Protocol):
    what: str

    def measure(self, measured: bool) -> float:
        """Microseconds of CPU per token or step of one round."""

    def added_us(self) -> float: ...

    def stop(self) -> None: ...


def cost_of(bench: Bench, rounds: int) -> Cost:
    """Each round has both kinds, and once more the one without, taking turns in who goes first: a
    machine's mood is in all of them."""
    turns = deque(("without", "again", "with"))
    found: dict[str, list[float]] = {kind: [] for kind in turns}
    try:
        for number in range(-1, rounds):
            turns.rotate()
            for kind in turns:
                spent = bench.measure(kind == "with")
                # The first round is for caches and connections.
                if number >= 0:
                    found[kind].append(spent)
        added_us = bench.added_us()
    finally:
        bench.stop()
    low, high = _middle_half(found["without"], found["with"])
    noise = max(map(abs, _middle_half(found["without"], found["again"])))
    without, others = median(found["without"]), median(found["with"])
    return Cost(bench.what, without, others, low, high, noise, added_us)


def _middle_half(before: list[float], after: list[float]) -> tuple[float, float]:
    shares = sorted(b / a - 1.0 for a, b in zip(before, after, strict=True))
    quarter = len(shares) // 4
    return shares[quarter], shares[-1 - quarter]


class RouterBench:
    """One engine, one dispatcher, and two gateways in front of it."""

    what = "router, per token"

    def __init__(self, tokenizer: Tokenizer) -> None:
        options = EngineOptions("e0", SECRET, max_num_seqs=STREAMS)
        self._engine = EngineService(EchoExecutor(STEP_S), options)
        self._hop, self._loop = LoopThread("hop"), LoopThread("router")
        port = self._hop.run(self._engine.start())
        self._servers: list[GatewayServer] = []
        self._loop.run(self._start(tokenizer, port))
        self._readers = Readers()

    async def _start(self, tokenizer: Tokenizer, engine_port: int) -> None:
        self._dispatcher = await _connected(engine_port)
        silent = RouterBoard("r0", self._dispatcher.facts)
        silent.meter = NoMeter()
        self._board = RouterBoard("r0", self._dispatcher.facts)
        config = GatewayConfig(address="127.0.0.1:0")
        for board in (silent, self._board):
            server = build_server(self._dispatcher, tokenizer, config, board)
            await server.start()
            self._servers.append(server)

    def measure(self, measured: bool) -> float:
        before = self._loop.run(_thread_time())
        tokens = self._readers.read(self._servers[measured].port)
        return (self._loop.run(_thread_time()) - before) / tokens * 1e6

    def added_us(self) -> float:
        per_stream = _stream_us(self._board.meter) - _stream_us(NoMeter())
        scrape = _cpu_us(self._board.metrics.text, 100)
        # As many tokens as this load makes between two scrapes.
        return per_stream / OUTPUT + scrape / (SCRAPE_PERIOD_S / STEP_S * STREAMS)

    def stop(self) -> None:
        self._readers.stop()
        for server in self._servers:
            self._loop.run(server.stop(0))
        self._loop.run(self._dispatcher.close())
        self._hop.run(self._engine.stop("the benchmark is over"))
        self._loop.stop()
        self._hop.stop()


class EngineBench:
    """Two engines, each with a dispatcher that asks for `streams` at once."""

    def __init__(self, streams: int) -> None:
        self.what = f"engine, per step of {streams} decodes"
        self._streams = streams
        self._router = LoopThread("router")
        self._sides = [self._side(None), self._side(0)]

    def _side(
        self, metrics_port: int | None
    ) -> tuple[EchoExecutor, EngineService, LoopThread, Dispatcher]:
        executor, hop = EchoExecutor(STEP_S), LoopThread("hop")
        options = EngineOptions("e0", SECRET, max_num_seqs=self._streams, metrics_port=metrics_port)
        engine = EngineService(executor, options)
        port = hop.run(engine.start())
        return executor, engine, hop, self._router.run(_connected(port))

    def measure(self, measured: bool) -> float:
        executor, engine, hop, dispatcher = self._sides[measured]
        before = executor.thread_s + hop.run(_thread_time())
        steps = engine.loop.load.step
        self._router.run(self._load(dispatcher))
        spent = executor.thread_s + hop.run(_thread_time()) - before
        return spent / (engine.loop.load.step - steps) * 1e6

    async def _load(self, dispatcher: Dispatcher) -> None:
        await asyncio.gather(*(_read(dispatcher, n) for n in range(self._streams)))

    def added_us(self) -> float:
        metrics = self._sides[1][1].metrics
        step = _cpu_us(lambda: metrics.stepped(0.0123), CALLS)
        step -= _cpu_us(lambda: NO_OBSERVER.stepped(0.0123), CALLS)
        return step + _cpu_us(metrics.text, 100) / (SCRAPE_PERIOD_S / STEP_S)

    def stop(self) -> None:
        for _, engine, hop, dispatcher in self._sides:
            self._router.run(dispatcher.close())
            hop.run(engine.stop("the benchmark is over"))
            hop.stop()
        self._router.stop()


class Readers:
    """A process that reads STREAMS streams of OUTPUT tokens each whenever it is told a port."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.bench.metrics_reader", str(STREAMS), str(OUTPUT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, port: int) -> int:
        """Tokens read."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the readers have no pipes")
        process.stdin.write(f"{port}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)


async def _connected(engine_port: int) -> Dispatcher:
    dispatcher = Dispatcher(LinkSettings("r0", SECRET))
    await dispatcher.set_engines({("127.0.0.1", engine_port)})
    while not dispatcher.ready():
        await asyncio.sleep(0.01)
    return dispatcher


async def _read(dispatcher: Dispatcher, number: int) -> None:
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
    stream = await dispatcher.open(GenerationRequest(f"r{number}", (5, 6, 7), params))
    try:
        while (await stream.next()).finish is None:
            continue
    finally:
        stream.leave()


async def _thread_time() -> float:
    return time.thread_time()


def _stream_us(meter: RouterMeter) -> float:
    """All that a call with OUTPUT tokens tells its meter."""

    def one() -> None:
        meter.began()
        stream = meter.stream(0.0, 3)
        for token in range(OUTPUT):
            stream.tokens(1, time.monotonic() if token else 0.01)
        stream.finished(FinishReason.LENGTH, 0.001)
        stream.over(1.0)
        meter.ended("Generate", "OK")

    return _cpu_us(one, CALLS // OUTPUT)


def _cpu_us(work: Callable[[], object], times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times * 1e6
