"""An engine as a router sees it: its newest frame, corrected for what is still on the way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.config import blocks_for
from cluster.core.load import EngineLoad


class EngineCapacity(NamedTuple):
    """What an engine is, whatever it does at present. Engines of one fleet may differ."""

    max_sequence_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size


class OnTheWay(NamedTuple):
    """A stream that the newest frame does not know of yet. tokens: to be computed at first."""

    stream: int
    tokens: int


@dataclass(slots=True)
class EngineSnapshot:
    """load: of the newest frame, None before the first. unseen: submitted after that frame's
    `seen`, oldest first. draining: takes no new work. weights: see ModelInfo.weights."""

    engine_id: str
    capacity: EngineCapacity
    load: EngineLoad | None = None
    unseen: deque[OnTheWay] = field(default_factory=deque)
    draining: bool = False
    weights: str = ""
    _unseen_tokens: int = 0
    _unseen_blocks: int = 0

    def submitted(self, stream: int, tokens: int) -> None:
        self.unseen.append(OnTheWay(stream, tokens))
        self._unseen_tokens += tokens
        self._unseen_blocks += self._blocks(tokens)

    def updated(self, load: EngineLoad, seen: int) -> None:
        self.load = load
        while self.unseen and self.unseen[0].stream <= seen:
            tokens = self.unseen.popleft().tokens
            self._unseen_tokens -= tokens
            self._unseen_blocks -= self._blocks(tokens)

    @property
    def streams(self) -> int:
        """Sequences it runs or has waiting, those on the way included."""
        known = 0 if self.load is None else self.load.running + self.load.waiting
        return known + len(self.unseen)

    @property
    def waiting(self) -> int:
        """Sequences without blocks, those on the way included."""
        return len(self.unseen) + (0 if self.load is None else self.load.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to be computed before all who wait, or are on the way, have their next one."""
        known = 0 if self.load is None else self.load.waiting_tokens
        return known + self._unseen_tokens

    @property
    def kv_use(self) -> float:
        """Share of its blocks in use, 0 to 1."""
        return 0.0 if self.load is None else self.load.kv_use

    @property
    def outstanding(self) -> float:
        """Tokens held or to be computed, as a share of the pool: how far from empty, whatever the
        engine's size. Above 1 it has more to do than it can hold."""
        held = self.kv_use * self.capacity.pool_tokens
        return (held + self.waiting_tokens) / self.capacity.pool_tokens

    @property
    def room(self) -> int:
        """Blocks that a newcomer may count on, those on the way taken off."""
        known = self.capacity.num_blocks if self.load is None else self.load.room
        return known - self._unseen_blocks

    def has_room(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens would run at once: nobody waits, a lane and blocks
        are free. An empty engine has room for whatever it can hold."""
        if self.streams == 0:
            return True
        load = self.load
        if load is not None and load.waiting:
            return False
        return self.streams < self.capacity.max_num_seqs and self._blocks(tokens) <= self.room

    def can_hold(self, sequence_len: int) -> bool:
        """Whether a sequence of at most `sequence_len` tokens could ever finish here."""
        return sequence_len <= self.capacity.max_sequence_len

    def takes(self, sequence_len: int) -> bool:
        """Whether it may be given such a sequence at all, now or for its queue."""
        return not self.draining and self.can_hold(sequence_len)

    def outranked_blocks(self, priority: int) -> int:
        """Blocks held by running sequences of a lower priority."""
        if self.load is None:
            return 0
        return sum(blocks for rank, blocks in self.load.held if rank < priority)

    def ttft_s(self, tokens: int) -> float:
        """Seconds until a newcomer of so many tokens has its first one: all prefill before it and
        its own, at the engine's present pace. 0 while the pace is not known."""
        load = self.load
        if load is None or load.step_s <= 0.0:
            return 0.0
        # What decodes leave of the budget is for prefill, at least a tenth.
        budget = self.capacity.max_num_batched_tokens
        per_step = max(budget - load.running, budget / 10.0)
        ahead = load.prefill_tokens + self.waiting_tokens + tokens
        return (ahead / per_step + 1.0) * load.step_s

    def _blocks(self, tokens: int) -> int:
        return blocks_for(tokens, self.capacity.block_size)
