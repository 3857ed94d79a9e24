"""What a scrape reads of a router and of an engine: plain numbers, counted where they happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.load import EngineLoad
from cluster.core.outcome import ENGINE_LOSSES, LossCause, ResumedFrom
from cluster.core.scheduler import Counters


@dataclass(slots=True)
class RouterCounters:
    """Totals of one router; they only grow. replays: streams that lost their engine and went on, by
    why it was lost. replayed_tokens: prompt and emitted ones of all streams that changed engines,
    moves by relief included: computed again."""

    losses: dict[LossCause, int] = field(default_factory=lambda: dict.fromkeys(ENGINE_LOSSES, 0))
    replays: dict[LossCause, int] = field(default_factory=lambda: dict.fromkeys(LossCause, 0))
    resumes: dict[ResumedFrom, int] = field(default_factory=lambda: dict.fromkeys(ResumedFrom, 0))
    replayed_tokens: int = 0


class RouterFacts(NamedTuple):
    """streams: in flight, read or kept for a reader. queued, queued_tokens: waiting at the router
    for an engine. engines: connected; draining: those of them that take nothing new."""

    streams: int
    queued: int
    queued_tokens: int
    relief_moves: int
    engines: int
    draining: int
    counters: RouterCounters


class EngineFacts(NamedTuple):
    """cached_blocks: free ones that still hold a prefix. granted: token budget of the newest step,
    budget_limit: the largest that it can be. itl_objective_s: that the budget holds, 0 for a fixed
    one. stalled_s: since work is there and no step has ended."""

    counters: Counters
    load: EngineLoad
    cached_blocks: int
    granted: int
    budget_limit: int
    itl_objective_s: float
    max_num_seqs: int
    routers: int
    draining: bool
    stalled_s: float
