"""`headway metrics`: where Prometheus finds routers and engines."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands import common

if TYPE_CHECKING:
    from headway.client import Client, Status


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "metrics",
        help="where Prometheus finds routers and engines",
        description="Metrics for Prometheus; docs/metrics.md lists them.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    targets = commands.add_parser(
        "targets",
        help="all routers and engines, as Prometheus' file_sd reads them",
        description="What /targets of a router's metrics port says, asked for at the front door.",
    )
    targets.add_argument("--file", type=Path, metavar="FILE", help="write it there, in one go")
    targets.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    common.add_interval_option(targets, 10.0, "time between two rounds")
    common.add_connection_options(targets)
    targets.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the router answered, 1 when it did not, 2 for bad options."""
    return common.reporting_errors(_targets, args)


def _targets(args: argparse.Namespace) -> int:
    from headway.client import Client

    interval_s, timeout_s = common.asking_again(args)
    with Client(common.connection_of(args)) as client:
        _tell(discovered(client.status(timeout_s=timeout_s)), args.file)
        try:
            while args.watch:
                time.sleep(interval_s)
                _again(client, timeout_s, args.file)
        except KeyboardInterrupt:
            return common.EXIT_OK
    return common.EXIT_OK


def discovered(status: Status) -> str:
    """The targets that a router's status names, as JSON."""
    from cluster.metrics.targets import Target, discovery

    routers = [Target(r.metrics, "router", r.router_id) for r in status.routers]
    engines = [Target(e.metrics, "engine", e.engine_id) for e in status.engines]
    return discovery([*routers, *engines])


def _again(client: Client, timeout_s: float, file: Path | None) -> None:
    """A router that is away for a while leaves the file as it is."""
    from headway.client import HeadwayRpcError

    try:
        _tell(discovered(client.status(timeout_s=timeout_s)), file)
    except HeadwayRpcError as error:
        print(f"headway: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def _tell(text: str, file: Path | None) -> None:
    if file is None:
        print(text, end="", flush=True)
        return
    # Prometheus watches the file: it must never see half of it.
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(text, "utf-8")
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)
