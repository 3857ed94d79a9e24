"""The books must add up: checks for tests, the simulator, and an engine that is idle."""

from __future__ import annotations

from collections import Counter

from cluster.core.config import SchedulerConfig
from cluster.core.errors import InvariantViolation
from cluster.core.lifecycle import State
from cluster.core.plan import StepPlan
from cluster.core.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raise InvariantViolation naming the first thing that is wrong. O(sequences + blocks)."""
    _check_blocks(scheduler)
    _check_states(scheduler)


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """A plan in flight against the limits and the pool."""
    config = scheduler.config
    _require(
        plan.num_tokens == sum(row.count for row in plan.rows),
        f"step {plan.step}: num_tokens {plan.num_tokens} is not the sum of its rows",
    )
    _require(
        plan.num_tokens <= plan.budget <= config.max_num_batched_tokens,
        f"step {plan.step}: {plan.num_tokens} tokens, budget {plan.budget}, "
        f"limit {config.max_num_batched_tokens}",
    )
    ids = [row.seq_id for row in plan.rows]
    _require(len(set(ids)) == len(ids), f"step {plan.step}: a sequence has two rows")
    _require(all(row.count >= 1 for row in plan.rows), f"step {plan.step}: an empty row")
    free = set(scheduler.kv.pool.free_blocks())
    for row in plan.rows:
        _require(
            free.isdisjoint(row.new_blocks),
            f"step {plan.step}: sequence {row.seq_id} is planned into a free block",
        )
    if scheduler.batching.stall_free:
        _check_decodes_served(plan, scheduler, set(ids))


def check_idle(scheduler: Scheduler) -> None:
    """Nothing is left: every block is free, every queue empty."""
    check_scheduler(scheduler)
    _require(len(scheduler) == 0, f"{len(scheduler)} sequences are left")
    held = scheduler.kv.pool.held
    _require(held == 0, f"{held} blocks are held by nobody")
    _require(scheduler.kv.host_used == 0, f"{scheduler.kv.host_used} host blocks are left over")


def _check_blocks(scheduler: Scheduler) -> None:
    pool = scheduler.kv.pool
    free = pool.free_blocks()
    _require(len(set(free)) == len(free), "a block is in the free list twice")
    _require(pool.free + pool.held == pool.num_blocks, "free + held is not the pool's size")
    owners = [*scheduler.sequences(), *scheduler.padding]
    holders = Counter(block for s in owners for block in s.blocks)
    holders.update(scheduler.kv.pending)
    for block in range(1, pool.num_blocks + 1):
        _require(
            pool.references(block) == holders[block],
            f"block {block}: {pool.references(block)} references, {holders[block]} holders",
        )
    for block in free:
        _require(pool.references(block) == 0, f"block {block} is free and referenced")
    for block, contents in pool.published().items():
        _require(pool.find(contents) == block, f"block {block} is not where its contents are found")
        _require(
            pool.references(block) > 0 or pool.is_cached(block),
            f"block {block} is published but neither held nor cached",
        )
    host = Counter(slot for s in scheduler.sequences() for slot in s.host_blocks)
    _require(max(host.values(), default=0) <= 1, "a host block has two owners")
    _require(host.total() == scheduler.kv.host_used, "host blocks are miscounted")


def _check_states(scheduler: Scheduler) -> None:
    config: SchedulerConfig = scheduler.config
    running = scheduler.running
    _require(
        len(running) <= config.max_num_seqs,
        f"{len(running)} sequences run, max_num_seqs is {config.max_num_seqs}",
    )
    waiting = list(scheduler.queue)
    _require(len(waiting) == len(scheduler.queue), "the queue miscounts itself")
    _require(
        scheduler.queue.tokens == sum(s.total for s in waiting),
        "the queue's token count is wrong",
    )
    placed = Counter(s.seq_id for s in [*running, *waiting])
    for sequence in scheduler.sequences():
        expected = 0 if sequence.state is State.PAUSED else 1
        _require(
            placed[sequence.seq_id] == expected,
            f"sequence {sequence.seq_id} ({sequence.state.value}) "
            f"is in {placed[sequence.seq_id]} places",
        )
        holds = sequence.state is State.RUNNING
        _require(
            holds or not sequence.blocks,
            f"sequence {sequence.seq_id} ({sequence.state.value}) holds blocks",
        )
        _require(
            0 <= sequence.computed < sequence.total,
            f"sequence {sequence.seq_id}: computed {sequence.computed} of {sequence.total}",
        )
        _require(
            holds or sequence.computed == 0 or bool(sequence.host_blocks),
            f"sequence {sequence.seq_id} ({sequence.state.value}) kept a computed count",
        )
        _require(
            sequence.computed <= sequence.capacity or bool(sequence.host_blocks),
            f"sequence {sequence.seq_id}: computed {sequence.computed} beyond its blocks",
        )
        _require(
            sequence.preemptions <= config.max_preemptions,
            f"sequence {sequence.seq_id} was preempted {sequence.preemptions} times",
        )
    _check_order(scheduler)


def _check_order(scheduler: Scheduler) -> None:
    """Returning sequences stand before newcomers of their priority."""
    newcomers: set[int] = set()
    for sequence in scheduler.queue:
        if sequence.state is State.WAITING:
            newcomers.add(sequence.priority)
        else:
            _require(
                sequence.priority not in newcomers,
                f"preempted sequence {sequence.seq_id} waits behind a newcomer of its priority",
            )


def _check_decodes_served(plan: StepPlan, scheduler: Scheduler, planned: set[int]) -> None:
    decodes = [s for s in scheduler.running if s.remaining == 1]
    unserved = [s.seq_id for s in decodes if s.seq_id not in planned]
    _require(
        not unserved or plan.num_decodes >= plan.budget,
        f"step {plan.step}: decodes {unserved[:5]} got no token though the budget had room",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)
