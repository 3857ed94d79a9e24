"""`headway deploy` and `headway undeploy`: the application on a Ray cluster that runs already."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from cluster.config.flags import add_config_flags, flags_of
from cluster.config.load import load_settings
from cluster.config.servefile import ServeFile, is_serve_file, read_serve_file
from cluster.progress import Timeline


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "deploy",
        help="serve on a running Ray cluster",
        description="Bring the application onto a running Ray cluster and return when it serves. "
        "Deployed again with other options, another model or newer code, it replaces engine by "
        "engine and router by router what has changed, without ending a stream. --config may also "
        "be a configuration file of Ray Serve, such as deploy/serve.yaml.",
    )
    _add_ray_address(parser)
    parser.add_argument(
        "--restart",
        action="store_true",
        help="replace every engine and router, even if nothing has changed: for weights that were "
        "exchanged in their folder",
    )
    parser.add_argument(
        "--nodes", type=int, default=0, metavar="N", help="wait until so many nodes have joined"
    )
    parser.add_argument(
        "--nodes-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for them (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="how long all replicas may take to start or be replaced (default: %(default)s)",
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
    given = ServeFile(args.config)
    if is_serve_file(args.config):
        given = read_serve_file(args.config)
    configured = load_settings(given.config, flags_of(args), os.environ)
    # Late: Ray takes seconds to import, and a wrong option is refused before.
    from cluster.connect import connected

    with connected(args.ray_address) as logs:
        from cluster.deployed import await_nodes, cluster_settings
        from cluster.rollout import Rollout

        await_nodes(args.nodes, args.nodes_timeout, say)
        settings = cluster_settings(
            configured, f"{time.time():.0f}" if args.restart else given.generation
        )
        model = settings.worker.model
        say(f"deploying {settings.routers} router(s), {_engines(settings)}, {model}")
        address = Rollout(settings, say, logs, args.timeout)()
    say(f"ready: {model} on {address} (gRPC); logs in {logs}")
    return 0


def run_undeploy(args: argparse.Namespace) -> int:
    from cluster.connect import connected

    with connected(args.ray_address):
        from cluster.rollout import take_down

        take_down()
    print("the application is gone; Ray goes on")
    return 0


def _engines(settings: Any) -> str:
    scaling = settings.scaling
    if scaling is None:
        return f"{settings.engines} engine(s)"
    return f"{scaling.min_engines} to {scaling.max_engines} engines"
