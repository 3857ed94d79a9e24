"""Policies by name: what a configuration may ask for, put together or refused."""

from __future__ import annotations

from collections.abc import Callable

from cluster.core.batching.base import BatchingPolicy
from cluster.core.batching.chunked import ChunkedPrefill
from cluster.core.batching.continuous import PrefillFirst
from cluster.core.batching.dynamic import DynamicBatching
from cluster.core.batching.fused import FusedPrompts
from cluster.core.batching.static import StaticBatching
from cluster.core.errors import ConfigError
from cluster.core.scheduler import Policies

DEFAULT_QUEUE_DELAY_S = 0.05


def make_policies(
    batching: str = "chunked",
    *,
    batch_size: int = 16,
    max_queue_delay_s: float = DEFAULT_QUEUE_DELAY_S,
) -> Policies:
    """A fresh set of policies. Raises ConfigError naming what is unknown or does not go together.

    batching: static, dynamic, continuous, fused or chunked. batch_size: of a request-level batch
    (the engine's max_num_seqs). max_queue_delay_s: how long dynamic waits for a batch to fill.
    """
    makers: dict[str, Callable[[], BatchingPolicy]] = {
        "static": lambda: StaticBatching(batch_size),
        "dynamic": lambda: DynamicBatching(batch_size, max_queue_delay_s),
        "continuous": PrefillFirst,
        "fused": FusedPrompts,
        "chunked": ChunkedPrefill,
    }
    return Policies(batching=_pick("batching policy", batching, makers)())


def _pick(
    what: str, name: str, makers: dict[str, Callable[[], BatchingPolicy]]
) -> Callable[[], BatchingPolicy]:
    try:
        return makers[name]
    except KeyError:
        raise ConfigError(f"unknown {what} {name!r}; there are {', '.join(makers)}") from None
