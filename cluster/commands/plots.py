"""`headway plots FOLDER`: the plots of README.md and docs/, from fresh simulations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigError

NAMES = ("policies", "budget", "relief", "overload")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plots",
        help="draw the plots of the documentation",
        description="Simulate and write the SVG files that README.md and docs/ show, with their "
        "numbers on stdout, a JSON object per line (a minute in all).",
    )
    parser.add_argument("folder", type=Path, help="where to; made if it is not there")
    parser.add_argument("--only", choices=NAMES, help="one of them (default: all)")
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of each workload's requests, for a quick look (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.share <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1, got {args.share!r}")
    from cluster.bench import plots

    names = NAMES if args.only is None else (args.only,)
    try:
        for path, data in plots.write(args.folder, names, args.share):
            print(json.dumps({"file": str(path), "data": data}), flush=True)
    except OSError as error:
        raise ConfigError(f"{args.folder}: {error}") from None
    return 0
