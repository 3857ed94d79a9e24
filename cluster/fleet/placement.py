"""Which engine a token log is (re)played on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cluster.fleet.snapshot import EngineSnapshot


class Placement(Protocol):
    def choose(self, engines: Iterable[EngineSnapshot], sequence_len: int) -> EngineSnapshot | None:
        """The engine for a sequence of at most `sequence_len` tokens; None if none can hold it."""


class LeastLoaded:
    """Fewest waiting tokens first, then fewest sequences, then the freest cache; a name breaks
    ties, so that the choice is the same everywhere."""

    def choose(self, engines: Iterable[EngineSnapshot], sequence_len: int) -> EngineSnapshot | None:
        fitting = [e for e in engines if e.max_sequence_len >= sequence_len]
        if not fitting:
            return None
        return min(fitting, key=lambda e: (e.waiting_tokens, e.streams, e.kv_use, e.engine_id))
