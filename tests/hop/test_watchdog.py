"""R03: work is present, nothing gets done, and health must say so."""

from __future__ import annotations

import asyncio
import threading
import time

from cluster.core.plan import StepPlan
from cluster.hop.link import LinkSettings
from cluster.hop.service import EngineOptions, EngineService
from cluster.router.dispatcher import Dispatcher
from cluster.sim.shadow import FinishedStep, ShadowExecutor
from tests.hop.support import SECRET, VOCAB, expected, read_all, request
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
