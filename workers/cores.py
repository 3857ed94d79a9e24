"""Which cores a worker runs on: none in particular, those it is told, or free ones that it claims.

A step is as fast as its slowest thread, and a thread that shares its core with a router or another
worker is slow. A claim is a lock on a file per core, in a folder that all workers of a user on a
machine share; the kernel drops it with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from cluster.core.errors import ConfigError

logger = logging.getLogger(__name__)

AUTO = "auto"
MAX_CORE = 4095
_TOPOLOGY = Path("/sys/devices/system/cpu")
_claims: dict[int, int] = {}
"""Core -> file descriptor of its lock. Of the process, as its threads' cores are."""


def settle_on_cores(wanted: str, threads: int) -> None:
    """Bind all threads of this process, and those they will start, as WorkerConfig.cores says.

    Raises ConfigError for a list that this process may not use or that is shorter than `threads`.
    """
    if not wanted or not hasattr(os, "sched_setaffinity") or _claims:
        return
    allowed = os.sched_getaffinity(0)
    if wanted != AUTO:
        chosen = _checked(parse_cores(wanted), allowed, threads)
    else:
        chosen = claim(physical_cores(allowed), threads, lock_folder())
        if not chosen:
            return
    bind(chosen)
    logger.info("bound to cores %s", sorted(chosen))


def check_cores(wanted: str, threads: int) -> None:
    """Raise what `settle_on_cores` would raise in this process, without binding it."""
    if wanted and wanted != AUTO and hasattr(os, "sched_getaffinity"):
        _checked(parse_cores(wanted), os.sched_getaffinity(0), threads)


def parse_cores(text: str) -> set[int]:
    """ "2-5,7" -> {2, 3, 4, 5, 7}. Raises ConfigError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"cores must be 'auto' or a list like '2-5,7', got {text!r}")
        if int(last or first) > MAX_CORE:
            raise ConfigError(f"cores must be numbers up to {MAX_CORE}, got {text!r}")
        found.update(range(int(first), int(last or first) + 1))
    return found


def physical_cores(allowed: Iterable[int], siblings: Mapping[int, int] | None = None) -> list[int]:
    """One logical core of each physical one, in order. siblings: core -> the first of those that
    share its physical core; by default as the kernel tells."""
    kept: dict[int, int] = {}
    for core in sorted(allowed):
        first = _first_sibling(core) if siblings is None else siblings[core]
        kept.setdefault(first, core)
    return list(kept.values())


def claim(cores: list[int], threads: int, folder: Path) -> set[int]:
    """Lock as many free cores as there are threads; all or none of them, and never the first of
    `cores`, which stays for the routers. Empty, with the reason logged, when there are too few."""
    locked: dict[int, int] = {}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for core in cores[1:]:
        if len(locked) == threads:
            break
        descriptor = os.open(folder / str(core), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            locked[core] = descriptor
    if len(locked) < threads:
        for descriptor in locked.values():
            os.close(descriptor)
        logger.warning(
            "not bound to cores: %d thread(s) want one each, %d of %d are free for workers",
            threads,
            len(locked),
            max(0, len(cores) - 1),
        )
        return set()
    _claims.update(locked)
    return set(locked)


def release() -> None:
    """Give up the claims of this process. Its threads stay where they are."""
    for descriptor in _claims.values():
        os.close(descriptor)
    _claims.clear()


def bind(cores: set[int]) -> None:
    """All threads of this process; a new thread is where the one is that starts it."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            continue  # it has ended meanwhile


def lock_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"headway-cores-{os.getuid()}"


def _checked(wanted: set[int], allowed: set[int], threads: int) -> set[int]:
    if missing := sorted(wanted - allowed):
        shown = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
        raise ConfigError(f"cores must be among {sorted(allowed)}, got {shown}")
    if len(wanted) < threads:
        raise ConfigError(f"cores must be at least as many as threads {threads}, got {len(wanted)}")
    return wanted


def _first_sibling(core: int) -> int:
    try:
        text = (_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return core
    return min(parse_cores(text.strip()))
