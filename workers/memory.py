"""How much memory there is, and how much this process holds."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROCESS_CGROUP = Path("/proc/self/cgroup")

_V1_CONTROLLER = "memory"
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    On the CPU the smaller of what the machine and what each enclosing cgroup has left: in a
    container the machine's figure alone would promise memory whose use gets the process killed.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    return min([available, *cgroup_rooms(_CGROUP_ROOT, _PROCESS_CGROUP)])


def resident_bytes() -> int:
    """Resident set size of this process."""
    return int(psutil.Process().memory_info().rss)


def cgroup_rooms(root: Path, membership: Path) -> list[int]:
    """Bytes left under each memory limit that encloses this process; empty without any.

    root: where cgroups are mounted. membership: /proc/<pid>/cgroup, lines of
    "id:controllers:path"; version 2 is the line with no controllers.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, files = root, _V2_FILES
        elif _V1_CONTROLLER in controllers.split(","):
            base, files = root / _V1_CONTROLLER, _V1_FILES
        else:
            continue
        # In a container the path may name the host's tree, which is not mounted: skip to what is.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                rooms.append(_room(folder, files))
    return [room for room in rooms if room is not None]


def _room(folder: Path, files: tuple[str, str, str]) -> int | None:
    limit_file, usage_file, cache_key = files
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # Page cache that nobody used lately is given back before anything is killed.
    cache = sum(int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == cache_key)
    return max(0, int(limit) - max(0, usage - cache))
