"""What every cost model is, and the three sums over a plan's rows that they all start from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cluster.core.plan import StepPlan


class StepCost(Protocol):
    def seconds(self, plan: StepPlan) -> float:
        """How long the step takes, launch overhead included."""

    def decode_seconds(self, sequences: int, positions: int) -> float:
        """The same for a step of decodes only. positions: contexts summed, the new one in each."""


class StepSize(NamedTuple):
    """A step, as far as its cost goes.

    tokens: rows' counts summed. positions: rows' end positions summed, which is what the step
    reads and writes of the KV cache. pairs: e(e + 1) - a(a + 1) summed over the rows [a, e), twice
    the (query, key) pairs of causal attention.

    A decode over c cached tokens is the row [c, c + 1), and so is a padding row of a static batch:
    no kind of row needs a rule of its own, and the pairs of a prompt telescope over its chunks.
    """

    tokens: int
    positions: int
    pairs: int


def size_of(plan: StepPlan) -> StepSize:
    """One pass over the rows, without an object per row."""
    rows = plan.rows
    starts = 0
    if plan.num_tokens == len(rows):
        # Rows of one token only: decodes, as nearly always.
        for row in rows:
            starts += row[1]
        positions = starts + len(rows)
        return StepSize(len(rows), positions, 2 * positions)
    pairs = 0
    for row in rows:
        start, count = row[1], row[2]
        starts += start
        pairs += count * (2 * start + count + 1)
    return StepSize(plan.num_tokens, starts + plan.num_tokens, pairs)


class PerStep:
    """The same time for every step, for arithmetic in steps. prefill_s: of one without a decode."""

    def __init__(self, decode_s: float = 1.0, prefill_s: float = 1.0) -> None:
        self._decode_s = decode_s
        self._prefill_s = prefill_s

    def seconds(self, plan: StepPlan) -> float:
        return self._decode_s if plan.num_decodes else self._prefill_s

    def decode_seconds(self, sequences: int, positions: int) -> float:
        return self._decode_s
