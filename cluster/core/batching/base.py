"""What every batching policy is, and moves that several of them share."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from cluster.core.draft import StepDraft
from cluster.core.sequence import Sequence


class BatchingPolicy(Protocol):
    name: str

    keeps_rows: bool
    """Whether members that are over keep their row until the whole batch is (padding)."""

    stall_free: bool
    """Whether every running decode is in every step, as far as the budget goes."""

    def compose(self, draft: StepDraft) -> None:
        """Give out the draft's budget. Called again from scratch when the pool turns out to be too
        small, so it must not keep state that a second call would spoil."""


def split(running: SequenceOf[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """(decodes, unfinished prefills), each in the order given."""
    decodes: list[Sequence] = []
    prefills: list[Sequence] = []
    for sequence in running:
        if len(sequence.tokens) - sequence.computed == 1:
            decodes.append(sequence)
        else:
            prefills.append(sequence)
    return decodes, prefills


def give_decodes(draft: StepDraft, decodes: list[Sequence]) -> None:
    """One token each. With more decodes than budget they rotate: the longest served ago first."""
    if len(decodes) > draft.budget:
        decodes = sorted(decodes, key=lambda s: s.turn)[: draft.budget]
    draft.give_each_one(decodes)


def give_chunks(draft: StepDraft, prefills: list[Sequence]) -> None:
    """As much of each prompt as the budget has left, first come first."""
    for sequence in prefills:
        if draft.budget == 0:
            return
        draft.give(sequence, min(sequence.remaining, draft.budget))


def start_newcomers(draft: StepDraft) -> None:
    """Admit while there is budget, and begin each with as much as fits."""
    while draft.budget > 0 and draft.start_next():
        pass
