"""R03: work is present, nothing gets done, and health must say so."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cluster.core.plan import StepPlan
from cluster.hop.link import LinkSettings
from cluster.hop.service import EngineOptions, EngineService
from cluster.router.dispatcher import Dispatcher
from cluster.sim.shadow import FinishedStep, ShadowExecutor
from tests.hop.support import SECRET, VOCAB, Engine, expected, read_all, request
from tests.hop.test_dispatcher import run


class StuckExecutor(ShadowExecutor):
    """A step that does not come back until it is let go, as a hung kernel or collective."""

    def __init__(self) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab=VOCAB, max_len=400)
        self.let_go = threading.Event()

    def submit(self, plan: StepPlan) -> FinishedStep:
        self.let_go.wait(20)
        return super().submit(plan)


def test_no_progress_with_work_present_is_reported_with_the_engine_s_state():
    async def scenario():
        executor = StuckExecutor()
        service = EngineService(executor, EngineOptions("a", SECRET, stall_s=0.3))
        port = await service.start()
        dispatcher = Dispatcher(LinkSettings("r", SECRET))
        await dispatcher.set_engines({("127.0.0.1", port)})
        assert service.health_problem() is None
        stream = await dispatcher.open(request(1))
        began = time.monotonic()
        while service.health_problem() is None:
            assert time.monotonic() - began < 5, "a stalled engine counts as healthy"
            await asyncio.sleep(0.02)
        problem = service.health_problem() or ""
        assert "no step has ended for" in problem
        assert "blocks_total=64" in problem, "the report does not say what state the engine is in"
        executor.let_go.set()
        assert await read_all(stream) == expected(request(1))
        assert service.health_problem() is None
        await dispatcher.close()
        await service.stop("test")

    run(scenario())


def test_an_idle_engine_never_counts_as_stalled():
    async def scenario():
        executor = StuckExecutor()
        executor.let_go.set()
        service = EngineService(executor, EngineOptions("a", SECRET, stall_s=0.1))
        await service.start()
        await asyncio.sleep(0.5)
        assert service.health_problem() is None
        await service.stop("test")

    run(scenario())


class BrokenExecutor(ShadowExecutor):
    """An executor whose tensor-parallel group is lost while nothing runs, or while a step hangs."""

    def __init__(self) -> None:
        super().__init__(num_blocks=64, block_size=4, vocab=VOCAB, max_len=400)
        self.broken = False
        self.let_go = threading.Event()

    def problem(self) -> str | None:
        return "rank 1 has ended" if self.broken else None

    def submit(self, plan: StepPlan) -> FinishedStep:
        self.let_go.wait(20)
        return super().submit(plan)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a step that hangs"])
def test_a_lost_executor_is_noticed_within_a_moment_and_its_streams_go_on_elsewhere(busy):
    async def scenario():
        executor = BrokenExecutor()
        service = EngineService(executor, EngineOptions("a", SECRET))
        port = await service.start()
        dispatcher = Dispatcher(LinkSettings("r", SECRET, silence_s=30.0))
        await dispatcher.set_engines({("127.0.0.1", port)})
        stream = await dispatcher.open(request(1)) if busy else None
        await asyncio.sleep(0.2)
        executor.broken = True
        began = time.monotonic()
        while service.health_problem() is None or dispatcher.engines():
            assert time.monotonic() - began < 2, "a dead group counts as a healthy engine"
            await asyncio.sleep(0.02)
        assert "rank 1 has ended" in (service.health_problem() or "")
        if stream is not None:
            other = Engine("b")
            await dispatcher.set_engines({await other.start()})
            assert await read_all(stream) == expected(request(1))
            await other.stop()
        executor.let_go.set()
        await dispatcher.close()
        await service.stop("test")

    run(scenario())
