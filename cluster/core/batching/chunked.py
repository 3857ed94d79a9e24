"""Chunked prefill: decodes first, prompts in what is left of the budget."""

from __future__ import annotations

from cluster.core.draft import StepDraft
from cluster.core.sequence import Sequence


class ChunkedPrefill:
    """Stall-free batching (Sarathi-Serve, OSDI 2024): every running decode gets its token in every
    step; unfinished prefills and then newcomers share the rest, so the gap between two tokens
    is bounded by the budget and never by somebody else's prompt.

    With more decodes than budget they rotate: those that have waited longest go first.
    """

    name = "chunked"

    def compose(self, draft: StepDraft) -> None:
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in draft.running:
            (decodes if sequence.remaining == 1 else prefills).append(sequence)
        if len(decodes) > draft.budget:
            decodes.sort(key=lambda s: s.turn)
            del decodes[draft.budget :]
        for sequence in decodes:
            draft.give(sequence, 1)
        for sequence in prefills:
            if draft.budget == 0:
                return
            draft.give(sequence, min(sequence.remaining, draft.budget))
        while draft.budget > 0:
            newcomer = draft.admit()
            if newcomer is None:
                return
            draft.start(newcomer, min(newcomer.remaining, draft.budget))
