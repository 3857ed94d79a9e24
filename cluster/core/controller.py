"""A token budget that keeps a promise about the gap between two tokens.

The gap that a decoding sequence sees is the time of a step. So each step's budget is the largest
whose predicted time, with a margin from the model's own recent errors, is within the objective.
Sarathi-Serve (OSDI 2024) profiles a fixed budget off line; here the model learns on line.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence as SequenceOf

from cluster.core.costmodel import StepSize, StepTimeModel
from cluster.core.errors import ConfigError
from cluster.core.plan import StepPlan
from cluster.core.sequence import Sequence


class ItlController:
    """Holds the 99th percentile of the gap between two tokens at `objective_s` seconds.

    max_tokens: no step's budget goes beyond it. Without running decodes there is no gap to keep
    short, and the budget is max_tokens.
    """

    name = "itl"

    MIN_CHUNK = 16
    """Prompts always get this much: an objective that decodes alone exceed must not starve them."""
    ERRORS = 200
    QUANTILE = 0.98
    GROWTH = 2
    """Per step, the chunk grows at most so much beyond what has been measured."""
    FIRST_CHUNK = 64
    FIRST_MARGIN = 0.1

    def __init__(self, objective_s: float, max_tokens: int) -> None:
        if not 1e-4 <= objective_s <= 60.0:
            raise ConfigError(f"itl_objective_s must be in [0.0001, 60], got {objective_s!r}")
        self._objective_s = objective_s
        self._max_tokens = max_tokens
        self._model = StepTimeModel()
        self._errors: deque[float] = deque()
        self._ordered: list[float] = []
        self._proven = self.FIRST_CHUNK
        """Chunk tokens to which the next step may go, from what steps have carried in time."""

    def tokens(self, running: SequenceOf[Sequence], waiting_tokens: int) -> int:
        decodes, positions, start, prefill = 0, 0, 0, waiting_tokens
        for sequence in running:
            remaining = len(sequence.tokens) - sequence.computed
            if remaining == 1:
                decodes += 1
                positions += sequence.computed + 1
                continue
            if prefill == waiting_tokens:
                start = sequence.computed
            prefill += remaining
        if decodes == 0:
            return self._max_tokens
        if prefill == 0:
            return decodes
        chunk = min(self._max_tokens - decodes, self._proven)
        if self._model.trusted:
            size = StepSize(decodes, positions, positions, decodes)
            limit_s = self._objective_s / (1.0 + self.margin)
            chunk = min(chunk, self._model.largest_chunk(size, start, limit_s))
        chunk = _even(prefill, max(self.MIN_CHUNK, chunk))
        return min(self._max_tokens, decodes + chunk)

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        size, chunk = _measure(plan)
        decode_only = chunk == 0
        ratio = self._model.observe(size, elapsed_s, decode_only)
        if decode_only:
            return
        self._note_error(ratio - 1.0)
        if elapsed_s <= self._objective_s:
            self._proven = max(self._proven, min(chunk * self.GROWTH, self._max_tokens))
        else:
            self._proven = max(self.FIRST_CHUNK, min(self._proven, chunk))

    @property
    def margin(self) -> float:
        """Relative, from the recent errors of the model; never negative."""
        ordered = self._ordered
        if not ordered:
            return self.FIRST_MARGIN
        return max(0.0, ordered[math.ceil(self.QUANTILE * (len(ordered) - 1))])

    def _note_error(self, error: float) -> None:
        if len(self._errors) == self.ERRORS:
            oldest = self._errors.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
        self._errors.append(error)
        insort(self._ordered, error)


def _even(prefill: int, largest: int) -> int:
    """The smallest chunk that needs no more steps than chunks of `largest`: equal shares. The
    longest step gets shorter, for who decodes and for who arrives while it runs."""
    steps = -(-prefill // largest)
    return -(-prefill // steps)


def _measure(plan: StepPlan) -> tuple[StepSize, int]:
    """(size of the step, tokens of it that are not decodes)."""
    positions, pairs, chunk = 0, 0.0, 0
    for _, start, count, _, _ in plan.rows:
        end = start + count
        positions += end
        pairs += count * start + count * (count + 1) / 2
        if count > 1:
            chunk += count
    return StepSize(plan.num_tokens, positions, pairs, len(plan.rows)), chunk
