"""The command-line options that choose scheduling policies, shared by `serve` and the simulator."""

from __future__ import annotations

import argparse

from cluster.core.policies import (
    BATCHING,
    BUDGETS,
    PREEMPTIONS,
    PREFIX_CACHE,
    QUEUES,
    RESERVATIONS,
    VICTIMS,
    PolicyChoice,
)

DEFAULTS = PolicyChoice()
DYNAMIC_DELAY_MS = 50.0
STATIC_WAIT_MS = 1000.0
"""A server's arrivals may dry up: then a static batch starts as it is."""


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--policy", default=DEFAULTS.batching, choices=BATCHING, help="how steps are composed"
    )
    group.add_argument("--queue", default=DEFAULTS.queue, choices=QUEUES, help="who is next")
    group.add_argument(
        "--reservation",
        default=DEFAULTS.reservation,
        choices=RESERVATIONS,
        help="blocks that a sequence takes when it comes in",
    )
    group.add_argument(
        "--victims", default=DEFAULTS.victims, choices=VICTIMS, help="who gives way for blocks"
    )
    group.add_argument(
        "--preemption",
        default=DEFAULTS.preemption,
        choices=PREEMPTIONS,
        help="what becomes of a victim's KV",
    )
    group.add_argument(
        "--host-blocks", type=int, default=0, metavar="N", help="host memory for --preemption swap"
    )
    group.add_argument(
        "--prefix-cache",
        default=DEFAULTS.prefix_cache,
        choices=PREFIX_CACHE,
        help="share KV blocks",
    )
    group.add_argument(
        "--budget",
        default=DEFAULTS.budget,
        choices=BUDGETS,
        help="fixed: --max-num-batched-tokens; itl: as many as --itl-objective allows",
    )
    group.add_argument(
        "--itl-objective",
        type=float,
        default=DEFAULTS.itl_objective_s * 1e3,
        metavar="MS",
        help="P99 of the gap between two tokens that --budget itl holds",
    )
    group.add_argument(
        "--max-queue-delay",
        type=float,
        default=None,
        metavar="MS",
        help="how long a request-level batch waits to fill (default: dynamic 50, static 1000)",
    )
    group.add_argument(
        "--aging",
        type=float,
        default=DEFAULTS.aging_s,
        metavar="S",
        help="seconds of waiting that count as one level of priority",
    )


def policy_choice(args: argparse.Namespace) -> PolicyChoice:
    """Raises nothing: PolicyChoice.build() refuses what does not go together."""
    delay_ms = args.max_queue_delay
    return PolicyChoice(
        batching=args.policy,
        queue=args.queue,
        reservation=args.reservation,
        victims=args.victims,
        preemption=args.preemption,
        prefix_cache=args.prefix_cache,
        budget=args.budget,
        max_queue_delay_s=(DYNAMIC_DELAY_MS if delay_ms is None else delay_ms) / 1e3,
        max_batch_wait_s=(STATIC_WAIT_MS if delay_ms is None else delay_ms) / 1e3,
        aging_s=args.aging,
        host_blocks=args.host_blocks,
        itl_objective_s=args.itl_objective / 1e3,
    )
