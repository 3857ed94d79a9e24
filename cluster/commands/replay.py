"""`headway replay`: run an engine's step log through the scheduler again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="check that a step log is planned the same again",
        description="Run a log written by `headway serve --step-log FOLDER` through a fresh "
        "scheduler. Exit code 0: every plan is the same; 1: one differs; 2: the log is damaged.",
    )
    parser.add_argument("log", type=Path, help="a .steplog file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cluster.engine.steplog import Difference, replay

    try:
        done = replay(args.log)
    except Difference as difference:
        print(f"headway: {args.log}: {difference}", file=sys.stderr)
        return 1
    print(
        f"{done.steps} steps, {done.tokens} tokens, {done.preemptions} preemptions: "
        "every plan is the same"
    )
    return 0
