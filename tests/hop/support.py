"""Real engines (scheduler, loop thread, TCP hop) over the shadow executor, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.core.plan import StepPlan, StepResult
from cluster.core.policies import PolicyChoice
from cluster.core.sampling import SamplingParams
from cluster.fleet.dispatch import FleetSettings
from cluster.fleet.gate import GateSettings
from cluster.hop.link import LinkSettings
from cluster.hop.service import EngineOptions, EngineService
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.router.stream import GenerationRequest, TokenBatch, TokenStream
from cluster.sim.shadow import FinishedStep, ShadowExecutor, reference_output
from tests.lagging import LaggingShadow

SECRET = "test-secret"
VOCAB = 97


class PacedExecutor(ShadowExecutor):
    """The shadow executor at a given pace, so that faults can hit a step under way."""

    def __init__(self, step_s: float, *, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, vocab=VOCAB, max_len=400)
        self.step_s = step_s

    def submit(self, plan: StepPlan) -> FinishedStep:
        time.sleep(self.step_s)
        step = super().submit(plan)
        step.result.elapsed_s = self.step_s
        return step


class PacedLagging(LaggingShadow):
    """The same with two steps under way: the next one is planned before the first is done."""

    def __init__(self, step_s: float, *, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, vocab=VOCAB, max_len=400)
        self.step_s = step_s

    def finish(self, plan: StepPlan) -> StepResult:
        time.sleep(self.step_s)
        return super().finish(plan)


@dataclass
class Engine:
    """One engine on loopback; stop() closes its connections as a death would."""

    name: str
    num_blocks: int = 64
    max_num_seqs: int = 16
    step_s: float = 0.001
    policies: PolicyChoice = field(default_factory=PolicyChoice)
    step_log_folder: str | None = None
    metrics_port: int | None = None
    executor_type: type[PacedExecutor] | type[PacedLagging] = PacedExecutor

    async def start(self, port: int = 0) -> tuple[str, int]:
        self.executor = self.executor_type(self.step_s, num_blocks=self.num_blocks, block_size=4)
        options = EngineOptions(
            engine_id=self.name,
            secret=SECRET,
            port=port,
            max_num_batched_tokens=32,
            max_num_seqs=self.max_num_seqs,
            policies=self.policies,
            step_log_folder=self.step_log_folder,
            metrics_port=self.metrics_port,
        )
        self.service = EngineService(self.executor, options)
        self.loop = self.service.loop
        self.port = await self.service.start()
        return ("127.0.0.1", self.port)

    async def stop(self) -> None:
        await self.service.stop("stopped by the test")


def waits(seconds: float) -> FleetSettings:
    """A fleet where nobody waits longer for an engine."""
    return FleetSettings(gate=GateSettings(queue_timeout_s=seconds))


@asynccontextmanager
async def fleet(
    *engines: Engine,
    settings: DispatcherSettings | None = None,
    silence_s: float = 2.0,
) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(LinkSettings("router-0", SECRET, silence_s=silence_s), settings)
    addresses = {await engine.start() for engine in engines}
    await dispatcher.set_engines(addresses)
    async with asyncio_timeout(5):
        while len(dispatcher.engines()) < len(engines):
            await asyncio.sleep(0.01)
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
        for engine in engines:
            await engine.stop()


@asynccontextmanager
async def asyncio_timeout(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout for Python 3.10 as well."""
    task = asyncio.current_task()
    assert task is not None
    handle = asyncio.get_running_loop().call_later(seconds, task.cancel)
    try:
        yield
    finally:
        handle.cancel()


def request(number: int, max_tokens: int = 40, prompt_len: int = 10) -> GenerationRequest:
    prompt = tuple((number * 7 + i * 3) % VOCAB for i in range(prompt_len))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=float(number % 2), seed=number)
    return GenerationRequest(f"r{number}", prompt, sampling)


def expected(req: GenerationRequest) -> list[int]:
    return reference_output(list(req.prompt_ids), req.sampling, VOCAB)


async def read_all(stream: TokenStream) -> list[int]:
    """Read to the finish, checking that indexes are contiguous and the finish comes once."""
    ids: list[int] = []
    try:
        while True:
            batch: TokenBatch = await stream.next()
            assert batch.first_index == len(ids)
            ids.extend(batch.token_ids)
            if batch.finish is not None:
                return ids
    finally:
        stream.leave()


async def settled(engine: Engine, timeout_s: float = 5.0) -> None:
    """Wait until the engine holds nothing."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        load = engine.loop.load
        if load.running == load.waiting == 0 and load.blocks_free == load.blocks_total:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"engine {engine.name} still holds work: {engine.loop.load}")
