"""Request-level batching: a batch starts together and ends together."""

from __future__ import annotations

import math

from cluster.core.batching.base import give_chunks, give_decodes, split, start_newcomers
from cluster.core.draft import StepDraft


class StaticBatching:
    """As FasterTransformer served requests: wait for a full batch, prefill it, decode until its
    longest member ends. Members that end earlier keep their row: the hardware computes it for
    nothing, and whoever waits goes on waiting.

    batch_size: members of a full batch; max_num_seqs of the engine. max_wait_s: how long the oldest
    member waits for the others. The systems of that time waited for ever; a server whose arrivals
    may dry up cannot. When no more will come (Scheduler.close_arrivals), what is left starts.
    """

    name = "static"
    keeps_rows = True
    stall_free = False

    def __init__(self, batch_size: int, max_wait_s: float = math.inf) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s

    def compose(self, draft: StepDraft) -> None:
        if not draft.running:
            if self._may_start(draft):
                start_newcomers(draft)
            return
        decodes, prefills = split(draft.running)
        if prefills:
            # The batch is still coming together: prompts only, and late members may join.
            give_chunks(draft, prefills)
            start_newcomers(draft)
            return
        give_decodes(draft, decodes)
        for member in draft.padding:
            if draft.budget > 0:
                draft.pad(member)

    def _may_start(self, draft: StepDraft) -> bool:
        queued = draft.queued
        if queued.count == 0:
            return False
        due_s = queued.oldest_arrival_s + self._max_wait_s
        if queued.count >= self._batch_size or queued.closed or draft.now >= due_s:
            return True
        draft.wait(
            f"{queued.count} of {self._batch_size} members of a batch are here",
            due_s if math.isfinite(due_s) else None,
        )
        return False
