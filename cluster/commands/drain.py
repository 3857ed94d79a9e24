"""`headway drain ENGINE`: no new work for it; what takes too long there goes on elsewhere."""

from __future__ import annotations

import argparse
import time

from cluster.commands import common

POLL_S = 0.5
MAX_GRACE_S = 7 * 86400.0
MOVE_S = 30.0
"""Within this an engine has given everything away, or something is wrong."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "drain",
        help="take no new work on an engine",
        description="Tell an engine to take nothing new and wait until it has finished what it "
        "has. What is left after the grace period goes on at other engines, as new streams do; "
        "where there is none, streams wait for one. No stream is cut.",
    )
    parser.add_argument("engine", help="name of the engine, see `headway status`")
    parser.add_argument("--undo", action="store_true", help="let it take work again")
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long it may go on with what it has (default: %(default)s)",
    )
    common.add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the engine has nothing left, 1 when it keeps something, 2 for bad input."""
    return common.reporting_errors(_drain, args)


def _drain(args: argparse.Namespace) -> int:
    from headway.client import Client

    if not 0 <= args.grace <= MAX_GRACE_S:
        raise common.UsageError(f"--grace must be 0 to {MAX_GRACE_S:g} s, got {args.grace:g}")
    began = time.monotonic()
    ends, gives_up = began + args.grace, began + args.grace + MOVE_S
    with Client(common.connection_of(args)) as client:
        left = client.drain(args.engine, undo=args.undo, timeout_s=args.timeout)
        if args.undo:
            print(f"{args.engine} takes work again")
            return common.EXIT_OK
        move = False
        while left and time.monotonic() < gives_up:
            if not move and time.monotonic() >= ends:
                move = True
                print(f"{args.engine} still has {left} sequences: they go on elsewhere")
            else:
                time.sleep(POLL_S)
            left = client.drain(args.engine, move=move, timeout_s=args.timeout)
    print(f"{args.engine} is drained" if not left else f"{args.engine} still has {left} sequences")
    return common.EXIT_SERVER if left else common.EXIT_OK
