"""`headway drain ENGINE`: no new work for an engine, until it has none."""

from __future__ import annotations

import argparse
import time

from cluster.commands import common

POLL_S = 0.5


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "drain",
        help="take no new work on an engine",
        description="Tell an engine to take nothing new and wait until it has finished what it "
        "has. Its streams are not cut; new ones go to the others, or wait for one.",
    )
    parser.add_argument("engine", help="name of the engine, see `headway status`")
    parser.add_argument("--undo", action="store_true", help="let it take work again")
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for what it has (default: %(default)s)",
    )
    common.add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the engine has nothing left, 1 when the grace was too short, 2 for bad input."""
    return common.reporting_errors(_drain, args)


def _drain(args: argparse.Namespace) -> int:
    from headway.client import Client

    if args.grace < 0:
        raise common.UsageError(f"--grace must be at least 0, got {args.grace:g}")
    deadline = time.monotonic() + args.grace
    with Client(common.connection_of(args)) as client:
        left = client.drain(args.engine, undo=args.undo, timeout_s=args.timeout)
        if args.undo:
            print(f"{args.engine} takes work again")
            return common.EXIT_OK
        while left and time.monotonic() < deadline:
            time.sleep(POLL_S)
            left = client.drain(args.engine, timeout_s=args.timeout)
    print(f"{args.engine} is drained" if not left else f"{args.engine} still has {left} sequences")
    return common.EXIT_SERVER if left else common.EXIT_OK
