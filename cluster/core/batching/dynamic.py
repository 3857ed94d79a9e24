"""Request-level batching with a limit on how long the first member waits for the others."""

from __future__ import annotations

from cluster.core.batching.static import StaticBatching
from cluster.core.errors import ConfigError


class DynamicBatching(StaticBatching):
    """As Triton's dynamic batcher: a batch starts when it is full or when its oldest member has
    waited `max_queue_delay_s` seconds; from then on it is a static batch."""

    name = "dynamic"

    def __init__(self, batch_size: int, max_queue_delay_s: float) -> None:
        if not 0.0 <= max_queue_delay_s <= 3600.0:
            raise ConfigError(f"max_queue_delay_s must be in [0, 3600], got {max_queue_delay_s!r}")
        super().__init__(batch_size, max_queue_delay_s)
