"""Continuous batching, prefill first: newcomers' prompts in a step of their own."""

from __future__ import annotations

from cluster.core.batching.base import give_chunks, give_decodes, split, start_newcomers
from cluster.core.draft import StepDraft


class PrefillFirst:
    """As vLLM's first scheduler (Kwon et al., SOSP 2023): sequences come and go between steps, and
    whenever somebody may come in, a step with prompts only is run while all decodes wait.

    A prompt longer than the budget takes several such steps in a row.
    """

    name = "continuous"
    keeps_rows = False
    stall_free = False

    def compose(self, draft: StepDraft) -> None:
        decodes, prefills = split(draft.running)
        give_chunks(draft, prefills)
        start_newcomers(draft)
        if not draft.shares and not draft.starts:
            give_decodes(draft, decodes)
