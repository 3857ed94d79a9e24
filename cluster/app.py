"""The composition root: the one module where workers, engine, router, gateway and Ray meet."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.actors.engine import EngineProgress, EngineReplica
from cluster.actors.ranks import RankActors
from cluster.actors.router import RouterReplica
from cluster.fleet.placements.registry import make_placement
from cluster.gateway.server import GatewayServer, build_server
from cluster.hop.link import LinkSettings
from cluster.hop.service import EngineOptions, EngineService
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.settings import ServeSettings
from cluster.text.tokenizer import Tokenizer

APP_NAME = "headway"
ROUTER_GRACE_S = 5.0
LAST_WORDS_S = 0.5


def build_engine(
    settings: ServeSettings, engine_id: str, host: str, progress: EngineProgress
) -> EngineService:
    """Load the model and put an engine around it. Runs inside the engine's process."""
    # Only here: routers and the driver do without torch.
    from workers.executors import make_executor
    from workers.parallel.rank import serve_rank

    launch = RankActors(serve_rank, settings.gpus_per_rank)
    executor = make_executor(settings.worker, progress, settings.policies.host_blocks, launch)
    options = EngineOptions(
        engine_id=engine_id,
        secret=settings.secret,
        host=host,
        max_num_batched_tokens=settings.worker.max_num_batched_tokens,
        max_num_seqs=settings.worker.max_num_seqs,
        watermark=settings.watermark,
        policies=settings.policies,
        step_log_folder=settings.step_log_folder,
    )
    return EngineService(executor, options)


class RunningRouter:
    """A dispatcher and the gateway in front of it."""

    def __init__(self, dispatcher: Dispatcher, server: GatewayServer) -> None:
        self._dispatcher = dispatcher
        self._server = server
        self.port = server.port

    def ready(self) -> bool:
        return self._dispatcher.ready()

    async def set_engines(self, addresses: set[tuple[str, int]]) -> None:
        await self._dispatcher.set_engines(addresses)

    async def stop(self) -> None:
        """No new calls, a grace period for those under way, then the engines are let go.

        What still runs shortly before the grace is over is ended by us, with a reason; gRPC would
        cut it off without one.
        """
        last_words = asyncio.create_task(self._end_streams_after(ROUTER_GRACE_S - LAST_WORDS_S))
        await self._server.stop(ROUTER_GRACE_S)
        last_words.cancel()
        await self._dispatcher.close()

    async def _end_streams_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._dispatcher.end_streams()


async def build_router(settings: ServeSettings, router_id: str) -> RunningRouter:
    """Start a router. Runs inside the router's process, in the loop that it will live in."""
    tokenizer = Tokenizer.from_folder(settings.worker.model)
    # Routers see the same frames; with different draws they do not rush to the same engine.
    fleet = replace(settings.fleet, seed=zlib.crc32(router_id.encode()))
    dispatcher = Dispatcher(
        LinkSettings(router_id, settings.secret),
        DispatcherSettings(fleet=fleet, tokenizer=tokenizer.digest),
        make_placement(settings.placement),
    )
    try:
        server = build_server(dispatcher, tokenizer, settings.gateway)
        await server.start()
    except BaseException:
        await dispatcher.close()
        raise
    return RunningRouter(dispatcher, server)


def _placement(settings: ServeSettings) -> dict[str, Any]:
    """A tensor-parallel group is on one node: a bundle per rank, the first one the engine's."""
    ranks = settings.worker.tensor_parallel_size
    if ranks == 1:
        return {}
    # Ray refuses a bundle of nothing. CPUs are not reserved: what an engine leaves, others use.
    bundle = {"GPU": settings.gpus_per_rank} if settings.gpus_per_rank else {"CPU": 0.001}
    return {
        "placement_group_bundles": [dict(bundle) for _ in range(ranks)],
        "placement_group_strategy": "STRICT_PACK",
    }


def application(settings: ServeSettings) -> Application:
    """The Serve application: engines, and routers in front of them."""
    engines = serve.deployment(
        name="Engine",
        num_replicas=settings.engines,
        ray_actor_options={"num_cpus": 0, "num_gpus": settings.gpus_per_rank},
        **_placement(settings),
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=45.0,
        # A model that does not load will not load the third time either.
        max_constructor_retry_count=1,
    )(EngineReplica).bind(partial(build_engine, settings), settings.hop_host)
    routers = serve.deployment(
        name="Router",
        num_replicas=settings.routers,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=40.0,
        max_constructor_retry_count=1,
    )(RouterReplica)
    app: Application = routers.bind(partial(build_router, settings), engines)
    return app
