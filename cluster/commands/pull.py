"""`headway pull`: fetch and convert the embedded default model."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.progress import StageLines, Timeline


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pull",
        help="fetch the embedded default model",
        description="Fetch SmolLM2-135M-Instruct (Apache-2.0) once and convert it into an "
        "ordinary Hugging Face folder in the cache.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from workers.pull import default_cache_dir, pull_default

    say = Timeline(lambda line: print(line, flush=True))
    folder = pull_default(default_cache_dir(), StageLines(say))
    say(f"the model is in {folder}")
    return 0
