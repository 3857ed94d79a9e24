"""A stream as the fleet sees it: what it needs, whose it is, and where it has been."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import TokenId


@dataclass(slots=True, eq=False)
class Job:
    """One stream that is to be placed, or is.

    tokens: prompt and emitted ones, to be computed where it is placed. sequence_len: prompt +
    max_tokens. prompt_ids: for placements that look for a shared prefix; may be empty. session: for
    those that keep a session together, "" for none. ttft_objective_s: when its first token is
    wanted, from its arrival. weights: what it was begun with (ModelInfo.weights), "" before that;
    it stays with them while there are engines that have them. moves: how often relief has moved it.
    """

    tokens: int
    sequence_len: int
    tenant: str = ""
    priority: int = 0
    session: str = ""
    prompt_ids: tuple[TokenId, ...] = ()
    ttft_objective_s: float | None = None
    arrival_s: float = 0.0
    moves: int = 0
    weights: str = ""
    begun: bool = False
    """Whether an engine was ever given it."""
    queued_s: float = 0.0
    """When it began to wait at the router, for the last time."""
