"""What every batching policy is."""

from __future__ import annotations

from typing import Protocol

from cluster.core.draft import StepDraft


class BatchingPolicy(Protocol):
    name: str

    def compose(self, draft: StepDraft) -> None:
        """Give out the draft's budget. Called again from scratch when the pool turns out to be too
        small, so it must not keep state that a second call would spoil."""
