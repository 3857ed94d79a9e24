"""How busy an engine is; in every step frame, so that routers place by fresh numbers."""

from __future__ import annotations

from typing import NamedTuple


class EngineLoad(NamedTuple):
    """Gauges at the end of a step, and totals since the engine started.

    waiting_tokens: tokens that the waiting sequences still have to compute before their next one.
    tokens_per_s: emitted tokens over the last seconds.
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
