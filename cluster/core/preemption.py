"""What preemption does with a victim's KV: throw it away, or put it into host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.core.errors import ConfigError
from cluster.core.sequence import Sequence


class Preemption(Protocol):
    name: str

    host_blocks: int
    """Blocks of host memory that may be used at once."""

    def swaps(self, victim: Sequence) -> bool:
        """Whether to move the victim's blocks out instead of recomputing them later."""


class Recompute:
    """A victim's KV is thrown away: a request is its token log, and prefill is fast."""

    name = "recompute"
    host_blocks = 0

    def swaps(self, victim: Sequence) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Measured speeds of the engine. prefill_tokens_per_s: of a prompt alone. copy_blocks_per_s:
    blocks per second between device and host, one way."""

    prefill_tokens_per_s: float
    copy_blocks_per_s: float

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "copy_blocks_per_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")


class CheaperOfBoth:
    """Swap a victim out where copying its blocks twice takes less time than computing its tokens
    again, and host memory has room; recompute it otherwise."""

    name = "swap"

    def __init__(self, host_blocks: int, costs: SwapCosts) -> None:
        if host_blocks < 1:
            raise ConfigError(f"host_blocks must be at least 1 with swapping, got {host_blocks}")
        self.host_blocks = host_blocks
        self._costs = costs

    def swaps(self, victim: Sequence) -> bool:
        copy_s = 2 * len(victim.blocks) / self._costs.copy_blocks_per_s
        return copy_s < victim.computed / self._costs.prefill_tokens_per_s
