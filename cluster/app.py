"""The composition root: the one module where workers, engine, router, gateway and Ray meet."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster import logs
from cluster.actors.engine import EngineProgress, EngineReplica, node_address
from cluster.actors.ranks import RankActors
from cluster.actors.router import RouterReplica
from cluster.actors.scaling import LOOK_BACK_S, PUBLISH_ENVIRONMENT, PUBLISH_S
from cluster.fleet.placements.registry import make_placement
from cluster.fleet.registry import Directory
from cluster.fleet.scaling import FleetDemand
from cluster.gateway.server import GatewayServer, build_server
from cluster.hop.link import LinkSettings
from cluster.hop.service import EngineOptions, EngineService
from cluster.metrics.board import RouterBoard, RouterSummary
from cluster.modelfolder import local_folder
from cluster.router.dispatcher import Dispatcher, DispatcherSettings
from cluster.settings import ServeSettings
from cluster.text.tokenizer import Tokenizer
from cluster.versions import engine_version, router_version

logger = logging.getLogger(__name__)

APP_NAME = "headway"
LAST_WORDS_S = 0.5
SHUTDOWN_MARGIN_S = 25.0
"""For what comes after a drain; then Serve kills the replica."""


def build_engine(
    settings: ServeSettings, engine_id: str, host: str, progress: EngineProgress
) -> EngineService:
    """Load the model and put an engine around it. Runs inside the engine's process."""
    observe = settings.observe
    logs.configure(observe.log_format, observe.log_level, {"engine_id": engine_id})
    settings = _at_home(settings, progress)
    # Only here: routers and the driver do without torch.
    from workers.executors import make_executor
    from workers.parallel.rank import serve_rank

    launch = RankActors(serve_rank, settings.gpus_per_rank)
    executor = make_executor(settings.worker, progress, settings.policies.host_blocks, launch)
    options = EngineOptions(
        engine_id=engine_id,
        secret=settings.secret,
        host=host,
        port=settings.hop_port,
        max_num_batched_tokens=settings.worker.max_num_batched_tokens,
        max_num_seqs=settings.worker.max_num_seqs,
        watermark=settings.watermark,
        policies=settings.policies,
        step_log_folder=settings.step_log_folder,
        metrics_port=settings.observe.engine_port,
    )
    return EngineService(executor, options)


class RunningRouter:
    """A dispatcher and the gateway in front of it."""

    def __init__(self, dispatcher: Dispatcher, server: GatewayServer) -> None:
        self._dispatcher = dispatcher
        self._server = server
        self._board = server.board
        self.port = server.port

    def ready(self) -> bool:
        return self._dispatcher.ready()

    async def refresh(self, directory: Directory) -> FleetDemand:
        """See actors.router.Router."""
        if directory.model is not None:
            self._dispatcher.expect(directory.model)
        await self._dispatcher.set_engines(directory.addresses)
        return self._dispatcher.demand()

    def meet(self, peers: list[RouterSummary]) -> None:
        self._board.peers = peers

    def told(self) -> RouterSummary:
        return self._board.summary()

    async def stop(self, grace_s: float) -> None:
        """No new calls, a grace period for those under way, then the engines are let go.

        What still runs shortly before the grace is over is ended by us, with a reason; gRPC would
        cut it off without one.
        """
        last_words = asyncio.create_task(self._end_streams_after(grace_s - LAST_WORDS_S))
        await self._server.stop(grace_s)
        last_words.cancel()
        await self._board.close()
        await self._dispatcher.close()

    async def _end_streams_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._dispatcher.end_streams()


async def _let_prometheus_in(
    board: RouterBoard, dispatcher: Dispatcher, settings: ServeSettings
) -> None:
    """A router that cannot be scraped serves all the same."""
    host = settings.hop_host or node_address()
    try:
        await board.serve(host, settings.observe.router_port, dispatcher.scraped)
    except OSError:
        logger.exception("no metrics: %s cannot be listened on", host)
    else:
        logger.info("metrics at http://%s/metrics", board.address)


async def build_router(settings: ServeSettings, router_id: str) -> RunningRouter:
    """Start a router. Runs inside the router's process, in the loop that it will live in."""
    observe = settings.observe
    logs.configure(observe.log_format, observe.log_level, {"router_id": router_id})
    settings = _at_home(settings, _unsaid)
    tokenizer = Tokenizer.from_folder(settings.worker.model)
    # Routers see the same frames; with different draws they do not rush to the same engine.
    fleet = replace(settings.fleet, seed=zlib.crc32(router_id.encode()))
    dispatcher = Dispatcher(
        LinkSettings(router_id, settings.secret),
        DispatcherSettings(
            fleet=fleet,
            tokenizer=tokenizer.digest,
            min_engines=0 if settings.may_be_without_engine else 1,
        ),
        make_placement(settings.placement),
    )
    try:
        board = RouterBoard(router_id, dispatcher.facts)
        server = build_server(dispatcher, tokenizer, settings.gateway, board)
        await server.start()
        await _let_prometheus_in(board, dispatcher, settings)
    except BaseException:
        await dispatcher.close()
        raise
    return RunningRouter(dispatcher, server)


def _at_home(settings: ServeSettings, progress: Callable[[str, float], None]) -> ServeSettings:
    """With the model's folder on this node."""
    folder = local_folder(settings.worker.model, progress)
    return replace(settings, worker=replace(settings.worker, model=str(folder)))


def _unsaid(stage: str, share: float) -> None:
    """Routers wait for the model as the engines do, and those tell."""


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


def _engine_count(settings: ServeSettings) -> dict[str, Any]:
    """A number, or what Serve is to make of what the engines publish."""
    scaling = settings.scaling
    if scaling is None:
        return {"num_replicas": settings.engines}
    # The first one also says whether the model can be served at all.
    first = min(max(settings.engines, 1, scaling.min_engines), scaling.max_engines)
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="cluster.actors.scaling:EnginePolicy", policy_kwargs=asdict(scaling)
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_engines,
            max_replicas=scaling.max_engines,
            initial_replicas=first,
            upscale_delay_s=scaling.up_delay_s,
            downscale_delay_s=scaling.down_delay_s,
            downscale_to_zero_delay_s=scaling.zero_delay_s,
            look_back_period_s=LOOK_BACK_S,
            metrics_interval_s=PUBLISH_S,
            policy=policy,
        )
    }


def _router_count(settings: ServeSettings) -> dict[str, Any]:
    count = {"num_replicas": settings.routers}
    if settings.routers_per_node:
        return {**count, "max_replicas_per_node": settings.routers_per_node}
    # A new router takes over the port before the old one has let go of it.
    return {**count, "max_surge_percent": 100}


def application(settings: ServeSettings) -> Application:
    """The Serve application: engines, and routers in front of them.

    Deployed again, it replaces one by one what has changed, and nothing else: see `versions`.
    """
    environment = {"env_vars": PUBLISH_ENVIRONMENT} if settings.scaling is not None else {}
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": environment}
    engines = serve.deployment(
        name="Engine",
        **_engine_count(settings),
        ray_actor_options={**options, "num_gpus": settings.gpus_per_rank},
        **_placement(settings),
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=settings.engine_drain_s + SHUTDOWN_MARGIN_S,
        # A model that does not load will not load the third time either.
        max_constructor_retry_count=1,
    )(EngineReplica)
    routers = serve.deployment(
        name="Router",
        **_router_count(settings),
        ray_actor_options=options,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=settings.router_drain_s + SHUTDOWN_MARGIN_S,
        max_constructor_retry_count=1,
    )(RouterReplica)
    bound_engines = engines.options(version=engine_version(settings), _internal=True).bind(
        partial(build_engine, settings), settings.hop_host, settings.engine_drain_s
    )
    app: Application = routers.options(version=router_version(settings), _internal=True).bind(
        partial(build_router, settings), bound_engines, settings.router_drain_s
    )
    return app
