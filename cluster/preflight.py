"""Checks before a start: what would fail in a minute fails now, and says what to change."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import psutil

from cluster.core.errors import ConfigError

MIN_MEMORY_BYTES = 2 << 30
MIN_SHM_BYTES = 128 << 20
MIN_PYTHON = (3, 10)
MAX_PYTHON = (3, 14)
SHM = Path("/dev/shm")


def check_python() -> None:
    if not MIN_PYTHON <= sys.version_info[:2] < MAX_PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        raise ConfigError(
            f"Python {found} is not supported; use one from {MIN_PYTHON[0]}.{MIN_PYTHON[1]} "
            f"up to, not including, {MAX_PYTHON[0]}.{MAX_PYTHON[1]}"
        )


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if nobody could listen there. Port 0 is always free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another address with "
                "--address HOST:PORT or stop what uses it"
            ) from error


def check_memory(needed_bytes: int) -> None:
    """needed_bytes: weights and the like; a floor for Ray and Python is added."""
    available = psutil.virtual_memory().available
    needed = needed_bytes + MIN_MEMORY_BYTES
    if available < needed:
        raise ConfigError(
            f"{_gib(available)} of memory are available, about {_gib(needed)} are needed; "
            "free some or serve a smaller model"
        )


def free_shared_memory(shm: Path = SHM) -> int | None:
    """Bytes; None where there is no such thing."""
    return shutil.disk_usage(shm).free if shm.is_dir() else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")


def check_shared_memory(shm: Path = SHM) -> None:
    """Ray's object store lives in shared memory; containers often give it 64 MiB."""
    free = free_shared_memory(shm)
    if free is not None and free < MIN_SHM_BYTES:
        raise ConfigError(
            f"{shm} has {free >> 20} MiB free, {MIN_SHM_BYTES >> 20} MiB are needed; "
            "start the container with --shm-size=1g or free it"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
