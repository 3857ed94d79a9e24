"""Policies by name: what a configuration may ask for, put together or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cluster.core.batching.base import BatchingPolicy
from cluster.core.batching.chunked import ChunkedPrefill
from cluster.core.batching.continuous import PrefillFirst
from cluster.core.batching.dynamic import DynamicBatching
from cluster.core.batching.fused import FusedPrompts
from cluster.core.batching.static import StaticBatching
from cluster.core.budget import Budget
from cluster.core.config import SchedulerConfig
from cluster.core.controller import ItlController
from cluster.core.errors import ConfigError
from cluster.core.kvspace import PrefixPolicy
from cluster.core.preemption import CheaperOfBoth, Preemption, Recompute, SwapCosts
from cluster.core.prefix import NoPrefixCache, PrefixCache
from cluster.core.queues.base import WaitingQueue
from cluster.core.queues.fair import FairQueue
from cluster.core.queues.fcfs import FcfsQueue
from cluster.core.queues.keyed import DeadlineQueue, PriorityQueue
from cluster.core.reserve import EstimatedPeak, KnownTokens, OnDemand, Reservation, WholeLife
from cluster.core.scheduler import Policies, Scheduler
from cluster.core.victims import (
    CheapestRecompute,
    LastAdmitted,
    LeastComputed,
    NewestArrival,
    VictimPolicy,
)

T = TypeVar("T")

BATCHING = ("static", "dynamic", "continuous", "fused", "chunked")
QUEUES = ("fcfs", "priority", "deadline", "fair")
RESERVATIONS = ("on-demand", "prompt", "worst-case", "estimated-peak")
VICTIMS = ("last-admitted", "lowest-priority", "least-computed", "cheapest-recompute")
PREEMPTIONS = ("recompute", "swap")
PREFIX_CACHE = ("off", "on")
BUDGETS = ("fixed", "itl")

DEFAULT_SWAP_COSTS = SwapCosts(prefill_tokens_per_s=10_000.0, copy_blocks_per_s=10_000.0)


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The policies of one engine, by name, and their numbers.

    max_queue_delay_s, max_batch_wait_s: how long dynamic and static wait for a batch to fill.
    aging_s: seconds of waiting that count as one level of priority. default_ttft_objective_s:
    deadline of requests that name none. fair_quantum: tokens per tenant and turn. host_blocks,
    swap_costs: for swap. itl_objective_s: the gap between two tokens that the itl budget holds at
    its 99th percentile.
    """

    batching: str = "chunked"
    queue: str = "fcfs"
    reservation: str = "estimated-peak"
    victims: str = "lowest-priority"
    preemption: str = "recompute"
    prefix_cache: str = "off"
    budget: str = "fixed"
    max_queue_delay_s: float = 0.05
    max_batch_wait_s: float = math.inf
    aging_s: float = 30.0
    default_ttft_objective_s: float = 1.0
    fair_quantum: int = 512
    host_blocks: int = 0
    swap_costs: SwapCosts = DEFAULT_SWAP_COSTS
    itl_objective_s: float = 0.025

    def build(self, *, batch_size: int, block_size: int, max_tokens: int) -> Policies:
        """A fresh set of policies for one scheduler. Raises ConfigError naming what is unknown or
        does not go together.

        batch_size: of a request-level batch (max_num_seqs). max_tokens: max_num_batched_tokens.
        """
        self._refuse_numbers()
        self._refuse_combinations()
        return Policies(
            batching=self._batching(batch_size),
            queue=self._queue(),
            reservation=_pick("reservation", self.reservation, _RESERVATIONS)(),
            victims=_pick("victim policy", self.victims, _VICTIMS)(),
            preemption=self._preemption(),
            prefix=self._prefix(block_size),
            budget=self._budget(max_tokens),
        )

    def _refuse_numbers(self) -> None:
        for name, low in (
            ("max_queue_delay_s", 0.0),
            ("aging_s", 0.001),
            ("default_ttft_objective_s", 0.001),
            ("itl_objective_s", 0.0001),
            ("fair_quantum", 1),
            ("host_blocks", 0),
        ):
            value = getattr(self, name)
            # A value that is not a number is not at least anything.
            if not low <= value < math.inf:
                raise ConfigError(f"{name} must be at least {low:g} and finite, got {value!r}")

    def _refuse_combinations(self) -> None:
        request_level = self.batching in ("static", "dynamic")
        if request_level and self.budget == "itl":
            raise ConfigError(
                f"budget 'itl' cannot hold an objective under batching {self.batching!r}, which "
                "runs prompts in steps of their own; use 'chunked'"
            )
        if self.batching in ("continuous", "fused") and self.budget == "itl":
            raise ConfigError(
                f"budget 'itl' needs batching 'chunked': {self.batching!r} runs whole prompts"
            )
        if self.preemption == "recompute" and self.host_blocks:
            raise ConfigError(f"host_blocks is {self.host_blocks}, but preemption is 'recompute'")
        if request_level and self.queue == "priority":
            raise ConfigError(
                f"queue 'priority' preempts running sequences, batching {self.batching!r} runs a "
                "batch to its end; use 'fcfs', 'deadline' or 'fair'"
            )

    def _batching(self, batch_size: int) -> BatchingPolicy:
        makers: dict[str, Callable[[], BatchingPolicy]] = {
            "static": lambda: StaticBatching(batch_size, self.max_batch_wait_s),
            "dynamic": lambda: DynamicBatching(batch_size, self.max_queue_delay_s),
            "continuous": PrefillFirst,
            "fused": FusedPrompts,
            "chunked": ChunkedPrefill,
        }
        return _pick("batching policy", self.batching, makers)()

    def _queue(self) -> WaitingQueue:
        makers: dict[str, Callable[[], WaitingQueue]] = {
            "fcfs": FcfsQueue,
            "priority": lambda: PriorityQueue(self.aging_s),
            "deadline": lambda: DeadlineQueue(self.default_ttft_objective_s),
            "fair": lambda: FairQueue(self.fair_quantum),
        }
        return _pick("queue", self.queue, makers)()

    def _preemption(self) -> Preemption:
        makers: dict[str, Callable[[], Preemption]] = {
            "recompute": Recompute,
            "swap": lambda: CheaperOfBoth(self.host_blocks, self.swap_costs),
        }
        return _pick("preemption", self.preemption, makers)()

    def _prefix(self, block_size: int) -> PrefixPolicy:
        makers: dict[str, Callable[[], PrefixPolicy]] = {
            "off": NoPrefixCache,
            "on": lambda: PrefixCache(block_size),
        }
        return _pick("prefix cache", self.prefix_cache, makers)()

    def _budget(self, max_tokens: int) -> Budget | None:
        makers: dict[str, Callable[[], Budget | None]] = {
            "fixed": lambda: None,
            "itl": lambda: ItlController(self.itl_objective_s, max_tokens),
        }
        return _pick("budget", self.budget, makers)()


_RESERVATIONS: dict[str, Callable[[], Reservation]] = {
    "on-demand": OnDemand,
    "prompt": KnownTokens,
    "worst-case": WholeLife,
    "estimated-peak": EstimatedPeak,
}
_VICTIMS: dict[str, Callable[[], VictimPolicy]] = {
    "last-admitted": LastAdmitted,
    "lowest-priority": NewestArrival,
    "least-computed": LeastComputed,
    "cheapest-recompute": CheapestRecompute,
}


def make_scheduler(config: SchedulerConfig, choice: PolicyChoice) -> Scheduler:
    """A scheduler with the policies of `choice`. Raises ConfigError (see PolicyChoice.build)."""
    policies = choice.build(
        batch_size=config.max_num_seqs,
        block_size=config.block_size,
        max_tokens=config.max_num_batched_tokens,
    )
    return Scheduler(config, policies)


def _pick(what: str, name: str, makers: Mapping[str, T]) -> T:
    try:
        return makers[name]
    except KeyError:
        raise ConfigError(f"unknown {what} {name!r}; there are {', '.join(makers)}") from None
