"""Continuous batching with whole prompts fused into the decode step."""

from __future__ import annotations

from cluster.core.batching.base import give_chunks, give_decodes, split
from cluster.core.draft import StepDraft


class FusedPrompts:
    """As Orca (Yu et al., OSDI 2022): decodes and the whole prompts of newcomers in one step.

    Only whole prompts come in; one that is longer than the budget itself is taken alone, in
    pieces, since it could never come in otherwise.
    """

    name = "fused"
    keeps_rows = False
    stall_free = True

    def compose(self, draft: StepDraft) -> None:
        decodes, prefills = split(draft.running)
        budget = draft.budget
        give_decodes(draft, decodes)
        give_chunks(draft, prefills)
        while draft.budget > 0:
            limit = None if self._alone(draft, budget) else draft.budget
            if not draft.start_next(at_most=limit):
                return

    def _alone(self, draft: StepDraft, budget: int) -> bool:
        """The next prompt is too long for any step, and no other prompt is in this one."""
        no_prompt = not draft.starts and all(count == 1 for _, count in draft.shares)
        return no_prompt and draft.queued.head_tokens > budget
