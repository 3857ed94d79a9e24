"""Looks at the node that it runs on. Judges nothing."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from cluster import preflight
from cluster.buildinfo import headway_version
from cluster.core.errors import ConfigError
from cluster.doctor.facts import Gpu, GpuFacts, KernelFacts, NodeFacts, Package, RoomFacts
from cluster.versions import code_digest

_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
_TIMEX_BYTES = 512
"""More than any struct timex; the first field, 0, says to change nothing."""


def probe(ports: Mapping[str, str]) -> NodeFacts:
    """ports: what for -> host:port. The clock is read last: when the answer is sent."""
    return NodeFacts(
        host=socket.gethostname(),
        python=platform.python_version(),
        headway=headway_version(),
        code=code_digest(),
        packages=tuple(packages(requirements())),
        gpu=gpu_facts(),
        kernels=kernel_facts(),
        room=room_facts(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        clock_synced=clock_synced(),
        own_name_s=own_name_s(),
        ports={f"{what} {address}": port_state(address) for what, address in ports.items()},
        clock_s=time.time(),
    )


def requirements() -> list[str]:
    """Of the installed distribution; empty when run from a checkout that was never installed."""
    try:
        return importlib.metadata.requires("headway-serving") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def packages(lines: Iterable[str]) -> Iterable[Package]:
    """What always has to be there, not what belongs to an extra."""
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            installed: str | None = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        yield Package(wanted.name, installed, str(wanted.specifier))


def gpu_facts() -> GpuFacts:
    seen = _nvidia_smi()
    try:
        import torch
    except (ImportError, OSError):
        return GpuFacts(seen, _driver(seen))
    usable = []
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                card = torch.cuda.get_device_properties(index)
                usable.append(Gpu(card.name, card.total_memory, f"{card.major}.{card.minor}"))
    nccl = ""
    if torch.version.cuda is not None:
        with contextlib.suppress(Exception):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return GpuFacts(seen, _driver(seen), tuple(usable), torch.version.cuda or "", nccl)


def _nvidia_smi() -> tuple[str, ...]:
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def _driver(seen: tuple[str, ...]) -> str:
    return seen[0].rpartition(",")[2].strip() if seen else ""


def kernel_facts() -> KernelFacts:
    from workers.native.build import existing, find_compiler
    from workers.native.levels import usable_levels

    best = usable_levels()[0]
    library = existing(best)
    return KernelFacts(best.name, find_compiler() or "", "" if library is None else str(library))


def room_facts() -> RoomFacts:
    from workers import manifest
    from workers.cachedir import default_cache_dir
    from workers.memory import cgroup_rooms
    from workers.sources import DEFAULT

    memory = psutil.virtual_memory()
    shm = shutil.disk_usage(preflight.SHM) if preflight.SHM.is_dir() else None
    cache = default_cache_dir()
    there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    missing = manifest.objection(cache / "models" / DEFAULT.name) is not None
    rooms = cgroup_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return RoomFacts(
        memory_free=min([int(memory.available), *rooms]),
        memory_total=int(memory.total),
        shm_free=None if shm is None else shm.free,
        shm_total=None if shm is None else shm.total,
        disk_free=shutil.disk_usage(there).free,
        cache=str(cache),
        cache_problem=_cannot_write(there),
        model_bytes=DEFAULT.free_bytes if missing else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _cannot_write(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def port_state(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        preflight.check_port(host, int(port))
    except ConfigError as error:
        cause = error.__cause__
        return cause.strerror or str(cause) if isinstance(cause, OSError) else str(error)
    return ""


def own_name_s(look_up: Callable[[str], object] = socket.getfqdn) -> float:
    """As every process of Ray looks it up when it starts."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        look_up(socket.gethostname())
    return time.monotonic() - began


def clock_synced() -> bool | None:
    """By what the kernel was told by whoever keeps its time."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (OSError, AttributeError):
        return None
    state = int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    return None if state < 0 else state != _TIME_ERROR
