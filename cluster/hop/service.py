"""A whole engine without Ray: executor, scheduler, loop and hop server, put together."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cluster.buildinfo import headway_version
from cluster.core.config import SchedulerConfig
from cluster.core.errors import ConfigError
from cluster.core.policies import PolicyChoice, make_scheduler
from cluster.engine.core import EngineCore
from cluster.engine.executor import Executor
from cluster.engine.loop import NO_OBSERVER, EngineLoop
from cluster.engine.steplog import RecordingCore
from cluster.fleet.scaling import EngineUse
from cluster.hop.server import EngineIdentity, HopServer
from cluster.metrics.engine import EngineMetrics
from cluster.metrics.facts import EngineFacts
from cluster.metrics.family import CONTENT_TYPE
from cluster.metrics.http import MetricsServer, Page

logger = logging.getLogger(__name__)


DEFAULT_POLICIES = PolicyChoice()
_DRAIN_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an operator chooses per engine, beside the worker's own configuration.

    secret: shared by the cluster. host, port: where routers reach this engine; the next free port
    if that one is taken, 0 is any.
    stall_s: with work present and no step done for this long, the engine counts as dead.
    step_log_folder: where to write a step log (engine.steplog); None writes none.
    metrics_port: where Prometheus may scrape, on `host`, the next free one if it is taken; 0 is any
    port, None measures nothing.
    """

    engine_id: str
    secret: str
    host: str = "127.0.0.1"
    port: int = 0
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 32
    watermark: float = 0.02
    max_preemptions: int = 4
    policies: PolicyChoice = DEFAULT_POLICIES
    stall_s: float = 60.0
    step_log_folder: str | None = None
    metrics_port: int | None = None


class EngineService:
    """Starts and stops the parts in order. Its coroutines belong to one asyncio loop."""

    def __init__(self, executor: Executor, options: EngineOptions) -> None:
        info = executor.info
        config = SchedulerConfig(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            watermark=options.watermark,
            max_preemptions=options.max_preemptions,
        )
        self.epoch = time.time_ns() // 1_000_000
        self.model = info
        self.port = 0
        self._options = options
        self._step_log: IO[bytes] | None = None
        self._server = HopServer(
            EngineIdentity(
                engine_id=options.engine_id,
                epoch=self.epoch,
                secret=options.secret,
                model=info,
                max_sequence_len=config.max_sequence_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            )
        )
        known = {"engine_id": options.engine_id, "model": info.name, "version": headway_version()}
        self.metrics = EngineMetrics(self.facts, known)
        self._scrapes = MetricsServer({"/metrics": Page(CONTENT_TYPE, self.metrics.text)})
        self._engine = self._core(config)
        self.loop = EngineLoop(
            self._engine,
            executor,
            self._server.publish,
            self._on_death,
            observer=NO_OBSERVER if options.metrics_port is None else self.metrics,
        )

    def _core(self, config: SchedulerConfig) -> EngineCore:
        policies, folder = self._options.policies, self._options.step_log_folder
        if folder is None:
            return EngineCore(make_scheduler(config, policies))
        path = Path(folder) / f"{self._options.engine_id}-{self.epoch}.steplog"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._step_log = path.open("wb")
        except OSError as error:
            raise ConfigError(f"step log {path}: {error.strerror}") from error
        logger.warning("the step log %s will contain prompts and outputs as token ids", path)
        return RecordingCore(policies, config, self._step_log)

    def use(self) -> EngineUse:
        """How much of this engine is taken, for autoscaling."""
        load = self.loop.load
        return EngineUse(
            outstanding=load.kv_use + load.waiting_tokens / self.model.pool_tokens,
            lanes=(load.running + load.waiting) / self._options.max_num_seqs,
        )

    async def start(self) -> int:
        """Returns the port on which routers are taken in."""
        if self._options.metrics_port is not None:
            self._server.metrics_port = await self._scrapes.start(
                self._options.host, self._options.metrics_port
            )
        self.loop.start()
        self.port = await self._server.start(self.loop, self._options.host, self._options.port)
        return self.port

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and finish what there is, for at most `grace_s`. What is left then is
        replayed elsewhere when the engine stops."""
        self._server.drain()
        deadline = time.monotonic() + grace_s
        while self.loop.failure is None and time.monotonic() < deadline:
            # The routers' submits that crossed the news are in by the next look.
            await asyncio.sleep(_DRAIN_POLL_S)
            load = self.loop.load
            if load.running + load.waiting == 0:
                return

    async def stop(self, reason: str) -> None:
        await self._server.stop(reason)
        await self._scrapes.stop()
        self.loop.stop()
        if self._step_log is not None:
            self._step_log.close()

    def facts(self) -> EngineFacts:
        """For a scrape, from any thread."""
        scheduler, options = self._engine.scheduler, self._options
        return EngineFacts(
            counters=scheduler.counters,
            load=self.loop.load,
            cached_blocks=scheduler.kv.pool.cached,
            granted=scheduler.granted,
            budget_limit=options.max_num_batched_tokens,
            itl_objective_s=(
                options.policies.itl_objective_s if options.policies.budget == "itl" else 0.0
            ),
            max_num_seqs=options.max_num_seqs,
            routers=len(self._server.routers),
            draining=self._server.draining,
            stalled_s=self.loop.stalled_for(),
        )

    def health_problem(self) -> str | None:
        """Why this engine should be replaced; None when it is well."""
        if self.loop.failure is not None:
            return f"the step loop died: {self.loop.failure!r}"
        stalled = self.loop.stalled_for()
        if stalled > self._options.stall_s:
            return f"work is present but no step has ended for {stalled:.0f} s: {self.loop.load}"
        return None

    def _on_death(self, error: BaseException) -> None:
        # The loop's thread is ending; routers must see EOF now, not at the next health check.
        self._server.abandon(f"engine died: {error!r}"[:1000])
