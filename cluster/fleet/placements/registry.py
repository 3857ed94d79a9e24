"""Placements by the name that the configuration uses."""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.errors import ConfigError
from cluster.fleet.placements.affinity import PrefixAffinity, SessionAffinity
from cluster.fleet.placements.base import Placement
from cluster.fleet.placements.least import LeastLoaded, LeastOutstanding
from cluster.fleet.placements.spread import PowerOfTwo, RoundRobin

PLACEMENTS: dict[str, Callable[[], Placement]] = {
    LeastOutstanding.name: LeastOutstanding,
    LeastLoaded.name: LeastLoaded,
    RoundRobin.name: RoundRobin,
    PowerOfTwo.name: PowerOfTwo,
    PrefixAffinity.name: PrefixAffinity,
    SessionAffinity.name: SessionAffinity,
}
"""The first is the default."""


def make_placement(name: str) -> Placement:
    """Raises ConfigError for an unknown name."""
    if name not in PLACEMENTS:
        raise ConfigError(f"placement must be one of {list(PLACEMENTS)}, got {name!r}")
    return PLACEMENTS[name]()
