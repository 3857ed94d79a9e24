"""How many nodes a cluster file starts at once, the head included; with --workers, where the
workers of a local provider are, as USER@ADDRESS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml


def nodes(cluster: dict[str, Any]) -> int:
    kinds: dict[str, Any] = cluster.get("available_node_types", {})
    if kinds:
        return 1 + sum(kind.get("min_workers", 0) for kind in kinds.values())
    return 1 + len(cluster["provider"].get("worker_ips", []))


def workers(cluster: dict[str, Any]) -> list[str]:
    user = cluster["auth"]["ssh_user"]
    return [f"{user}@{address}" for address in cluster["provider"].get("worker_ips", [])]


if __name__ == "__main__":
    loaded = yaml.safe_load(Path(sys.argv[1]).read_text("utf-8"))
    print(" ".join(workers(loaded)) if "--workers" in sys.argv else nodes(loaded))
