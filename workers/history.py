"""Which tokens a sequence holds, for penalties: kept up to date token by token."""

from __future__ import annotations

import numpy as np

from cluster.core.ids import TokenId

_FIRST_CAPACITY = 256


class TokenHistory:
    """Distinct tokens of prompt and output, and how often the output holds each.

    Follows from the token log alone, so that a replay finds the same penalties.
    """

    def __init__(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Token ids, [n] each."""
        # In order of first appearance, the prompt's first: append() keeps that order as well.
        distinct = list(dict.fromkeys([*prompt.tolist(), *output.tolist()]))
        self._slot_of = {token_id: slot for slot, token_id in enumerate(distinct)}
        capacity = max(_FIRST_CAPACITY, 2 * len(distinct))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: len(distinct)] = distinct
        for token_id in output.tolist():
            self._counts[self._slot_of[token_id]] += 1

    @property
    def ids(self) -> np.ndarray:
        """[distinct tokens] int64; a view, valid until the next append()."""
        return self._ids[: len(self._slot_of)]

    @property
    def output_counts(self) -> np.ndarray:
        """[distinct tokens] float32, how often the output holds each of `ids`; a view."""
        return self._counts[: len(self._slot_of)]

    def append(self, token_id: TokenId) -> None:
        """Add an output token."""
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = len(self._slot_of)
            self._slot_of[token_id] = slot
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.concatenate([self._counts, np.zeros(slot, np.float32)])
            self._ids[slot] = token_id
        self._counts[slot] += 1
