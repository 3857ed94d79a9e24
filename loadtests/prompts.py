"""Prompts of real text with the asked number of tokens, the same for the same key everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from cluster.core.errors import ConfigError
from loadtests.scenario import PlannedRequest

CORPUS = Path(__file__).parent / "data" / "corpus.txt"
HASH_BLOCK = 512
"""Tokens of a prompt that one hash id stands for in a trace."""
WINDOW = 32
"""Tokens that are taken from one place of the corpus."""

T = TypeVar("T")


def corpus_text() -> str:
    return " ".join(CORPUS.read_text("utf-8").split())


def windows(pool: Sequence[T], key: str, length: int) -> list[T]:
    """`length` items of the pool: windows from places that `key` draws."""
    if not pool:
        raise ConfigError("the corpus came out empty")
    places = random.Random(key)
    items: list[T] = []
    while len(items) < length:
        start = places.randrange(max(1, len(pool) - WINDOW))
        items += pool[start : start + WINDOW]
    return items[:length]


class PromptMaker(Generic[T]):
    """pool: the corpus as units that are about a token each: token ids, or words for a server
    that takes text only. units_per_token: how many of them make a token."""

    def __init__(self, pool: Sequence[T], seed: int, units_per_token: float = 1.0) -> None:
        self._pool = pool
        self._seed = seed
        self._scale = units_per_token

    def make(self, request: PlannedRequest) -> list[T]:
        """The units that this request adds to its session's history.

        Equal hash ids give equal blocks, so that prefixes shared in a trace are shared here.
        """
        length = max(1, round(request.input_length * self._scale))
        if not request.hash_ids:
            key = f"{self._seed} {request.session} {request.turn} {request.number}"
            return windows(self._pool, key, length)
        block = max(1, round(HASH_BLOCK * self._scale))
        units: list[T] = []
        for hash_id in request.hash_ids:
            if len(units) >= length:
                break
            units += windows(self._pool, f"hash {hash_id}", block)
        short = length - len(units)
        units += windows(self._pool, f"{self._seed} rest {request.number}", max(0, short))
        return units[:length]
