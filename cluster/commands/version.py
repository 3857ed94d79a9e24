"""`headway version`."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

PARTS = ("torch", "ray", "grpcio", "protobuf", "msgspec", "tokenizers", "safetensors")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "version", help="versions of Headway and of what it stands on"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(f"headway {importlib.metadata.version('headway-serving')}")
    print(f"python {platform.python_version()}")
    for part in PARTS:
        try:
            print(f"{part} {importlib.metadata.version(part)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{part} not installed")
    return 0
