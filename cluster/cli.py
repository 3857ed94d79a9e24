"""The `headway` command. Subcommands import what they need when they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cluster.commands import (
    bench,
    chat,
    config,
    deploy,
    doctor,
    drain,
    generate,
    health,
    loadtest,
    metrics,
    plan,
    plots,
    pull,
    replay,
    serve,
    simulate,
    status,
    top,
    version,
)
from cluster.core.errors import ConfigError, HeadwayError, InvalidRequest, ModelError

EXIT_BAD_INPUT = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


COMMANDS = (
    serve,
    deploy,
    config,
    doctor,
    pull,
    generate,
    chat,
    status,
    top,
    health,
    drain,
    simulate,
    plan,
    plots,
    loadtest,
    metrics,
    bench,
    replay,
    version,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway", description="Distributed serving of large language models."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Exit codes: 0 done, 1 failed, 2 the input must change, 130 interrupted."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ConfigError, ModelError, InvalidRequest) as error:
        print(f"headway: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
