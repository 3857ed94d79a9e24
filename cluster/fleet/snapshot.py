"""An engine as a router sees it: its newest frame, corrected for what is still on the way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.core.load import EngineLoad


@dataclass(slots=True)
class EngineSnapshot:
    """load: of the newest frame, None before the first. unseen: (stream id, tokens to prefill) that
    were submitted after that frame's `seen`, oldest first."""

    engine_id: str
    max_sequence_len: int
    load: EngineLoad | None = None
    unseen: deque[tuple[int, int]] = field(default_factory=deque)

    def submitted(self, stream: int, tokens: int) -> None:
        self.unseen.append((stream, tokens))

    def updated(self, load: EngineLoad, seen: int) -> None:
        self.load = load
        while self.unseen and self.unseen[0][0] <= seen:
            self.unseen.popleft()

    @property
    def streams(self) -> int:
        """Sequences it runs or has waiting, those on the way included."""
        known = 0 if self.load is None else self.load.running + self.load.waiting
        return known + len(self.unseen)

    @property
    def waiting_tokens(self) -> int:
        known = 0 if self.load is None else self.load.waiting_tokens
        return known + sum(tokens for _, tokens in self.unseen)

    @property
    def kv_use(self) -> float:
        """Share of its blocks in use, 0 to 1."""
        if self.load is None or self.load.blocks_total == 0:
            return 0.0
        return 1.0 - self.load.blocks_free / self.load.blocks_total
