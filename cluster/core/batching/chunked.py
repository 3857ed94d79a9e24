"""Chunked prefill: decodes first, prompts in what is left of the budget."""

from __future__ import annotations

from cluster.core.batching.base import give_chunks, give_decodes, split, start_newcomers
from cluster.core.draft import StepDraft


class ChunkedPrefill:
    """Stall-free batching (Sarathi-Serve, OSDI 2024; vLLM V1): every running decode gets its token
    in every step; unfinished prefills and then newcomers share the rest, so the gap between two
    tokens is bounded by the budget and never by somebody else's prompt.
    """

    name = "chunked"
    keeps_rows = False
    stall_free = True

    def compose(self, draft: StepDraft) -> None:
        decodes, prefills = split(draft.running)
        give_decodes(draft, decodes)
        give_chunks(draft, prefills)
        start_newcomers(draft)
