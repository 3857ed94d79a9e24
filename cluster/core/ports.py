"""Ports of processes of which several may be on one node."""

from __future__ import annotations

PORTS_TRIED = 64
"""So many replicas of a kind on one node have pinned ports; those beyond take any."""


def near(port: int) -> list[int]:
    """What to try to listen on, in order: the port, those that follow it, and at last any (0)."""
    if port == 0:
        return [0]
    return [*range(port, min(port + PORTS_TRIED, 1 << 16)), 0]
