"""`headway deploy` and `headway undeploy`: the application on a Ray cluster that runs already."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.config.flags import add_config_flags, flags_of
from cluster.config.load import load_settings
from cluster.core.errors import HeadwayError
from cluster.progress import Timeline


class NoCluster(HeadwayError):
    """There is no Ray to deploy to."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "deploy",
        help="serve on a running Ray cluster",
        description="Bring the application onto a running Ray cluster and return when it serves. "
        "Deployed again with other options, another model or newer code, it replaces engine by "
        "engine and router by router what has changed, without ending a stream.",
    )
    _add_ray_address(parser)
    parser.add_argument(
        "--restart",
        action="store_true",
        help="replace every engine and router, even if nothing has changed: for weights that were "
        "exchanged in their folder",
    )
    add_config_flags(parser)
    parser.set_defaults(run=run)
    parser = subparsers.add_parser(
        "undeploy",
        help="take the application off a Ray cluster",
        description="Stop routers and engines; Ray goes on. Streams may finish within seconds.",
    )
    _add_ray_address(parser)
    parser.set_defaults(run=run_undeploy)


def _add_ray_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray-address",
        default="auto",
        metavar="HOST:PORT",
        help="of the cluster's head; auto: the one this node belongs to (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """0 when all that was asked for runs, and nothing else any more."""
    say = Timeline(lambda line: print(line, flush=True))
    configured = load_settings(args.config, flags_of(args), os.environ)
    with _ray(args.ray_address) as logs:
        # Late: Ray takes seconds to import, and a wrong option is refused before.
        from cluster.deployed import cluster_settings
        from cluster.rollout import Rollout

        settings = cluster_settings(configured, f"{time.time():.0f}" if args.restart else "")
        model = settings.worker.model
        say(f"deploying {settings.routers} router(s), {_engines(settings)}, {model}")
        address = Rollout(settings, say, logs)()
    say(f"ready: {model} on {address} (gRPC); logs in {logs}")
    return 0


def run_undeploy(args: argparse.Namespace) -> int:
    with _ray(args.ray_address):
        from cluster.rollout import take_down

        take_down()
    print("the application is gone; Ray goes on")
    return 0


def _engines(settings: Any) -> str:
    scaling = settings.scaling
    if scaling is None:
        return f"{settings.engines} engine(s)"
    return f"{scaling.min_engines} to {scaling.max_engines} engines"


@contextmanager
def _ray(address: str) -> Iterator[str]:
    """Connected to a running Ray; the folder of its logs."""
    import ray

    from cluster.actors.coordinator import NAMESPACE

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        context = ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except ConnectionError as error:
        raise NoCluster(
            f"no Ray cluster at {address}: {str(error).splitlines()[0]}; start one with `ray up` "
            "or `ray start --head`, name it with --ray-address, or use `headway serve`"
        ) from error
    try:
        session: str = context.address_info["session_dir"]  # type: ignore[attr-defined]
        yield os.path.join(session, "logs")
    finally:
        ray.shutdown()
