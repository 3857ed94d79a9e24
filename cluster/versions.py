"""What makes a running engine or router an old one: a version per deployment.

Serve replaces a replica whose version differs from the one asked for, and leaves the others alone.
So another number of engines starts or stops some and touches no router, a new key file touches no
engine, and new code touches all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cluster.settings import ServeSettings

_CODE = ("*.py", "*.cpp", "*.h")


def engine_version(settings: ServeSettings) -> str:
    return _digest(
        code_digest(),
        settings.worker,
        settings.policies,
        settings.watermark,
        settings.gpus_per_rank,
        settings.hop_host,
        settings.hop_port,
        settings.step_log_folder,
        settings.observe,
        settings.secret,
        settings.generation,
    )


def router_version(settings: ServeSettings) -> str:
    return _digest(
        code_digest(),
        settings.worker.model,
        settings.gateway,
        settings.placement,
        settings.fleet,
        settings.observe,
        settings.hop_host,
        settings.may_be_without_engine,
        settings.secret,
        settings.generation,
    )


@cache
def code_digest() -> str:
    """Of the code that is installed here."""
    root = Path(__file__).parent.parent
    folders = [root / "cluster", root / "workers", root / "headway", root / "proto" / "headway"]
    return _digest(*(path.read_bytes() for path in _sources(folders)))


def _sources(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for kind in _CODE for path in folder.rglob(kind))


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:16]
