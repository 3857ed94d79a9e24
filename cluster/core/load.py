"""How busy an engine is; in every step frame, so that routers place by fresh numbers."""

from __future__ import annotations

from typing import NamedTuple


class EngineLoad(NamedTuple):
    """Gauges at the end of a step, and totals since the engine started.

    waiting_tokens: tokens that the waiting sequences still have to compute before their next one.
    tokens_per_s: emitted tokens over the last seconds.
    room: blocks that a newcomer may count on: free ones, less the watermark and what the running
    sequences are still expected to take (the engine's own reservation).
    step_s: seconds per step, smoothed. prefill_tokens: tokens still to be computed for running
    sequences beyond their next one. held: (priority, blocks held by running sequences of it),
    lowest priority first.
    """

    step: int
    blocks_free: int
    blocks_total: int
    running: int
    waiting: int
    waiting_tokens: int
    tokens_per_s: float
    emitted_tokens: int
    preemptions: int
    recomputed_tokens: int
    room: int = 0
    step_s: float = 0.0
    prefill_tokens: int = 0
    held: tuple[tuple[int, int], ...] = ()

    @property
    def kv_use(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.blocks_free / self.blocks_total if self.blocks_total else 0.0
