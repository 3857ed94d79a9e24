"""The books must add up: checks for tests, the simulator, and an engine that is idle."""

from __future__ import annotations

from collections import Counter

from cluster.core.config import SchedulerConfig
from cluster.core.errors import InvariantViolation
from cluster.core.lifecycle import State
from cluster.core.plan import StepPlan
from cluster.core.scheduler import Scheduler
from cluster.core.sequence import UNKNOWN_TOKEN, Sequence


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
    kv, pool = scheduler.kv, scheduler.kv.pool
    free = pool.free_blocks()
    _require(len(set(free)) == len(free), "a block is in the free list twice")
    _require(pool.free + pool.held == pool.num_blocks, "free + held is not the pool's size")
    holders = [0] * (pool.num_blocks + 1)
    for owner in (*scheduler.sequences(), *scheduler.padding):
        for block in owner.blocks:
            holders[block] += 1
    for block in kv.pending:
        holders[block] += 1
    references = pool.reference_counts()
    if references != holders:
        block = next(b for b, n in enumerate(references) if n != holders[b])
        raise InvariantViolation(
            f"block {block}: {references[block]} references, {holders[block]} holders"
        )
    for block in free:
        if references[block]:
            raise InvariantViolation(f"block {block} is free and referenced")
    for block, contents in pool.published().items():
        if pool.find(contents) != block:
            raise InvariantViolation(f"block {block} is not where its contents are found")
        if not references[block] and not pool.is_cached(block):
            raise InvariantViolation(f"block {block} is published but neither held nor cached")
    slots = [slot for s in scheduler.sequences() for slot in s.host_blocks]
    _require(len(set(slots)) == len(slots), "a host block has two owners")
    _require(len(slots) == kv.host_used, "host blocks are miscounted")


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
    placed = Counter([s.seq_id for s in running] + [s.seq_id for s in waiting])
    for sequence in scheduler.sequences():
        fault = _fault(sequence, placed[sequence.seq_id], config)
        if fault:
            name = f"sequence {sequence.seq_id} ({sequence.state.value})"
            raise InvariantViolation(f"{name} {fault}")
    if scheduler.in_flight is None:
        behind = [s.seq_id for s in running if s.settled != s.computed]
        _require(not behind, f"sequences {behind[:5]} count on a step, but none is in flight")
    _check_order(scheduler)


def _fault(sequence: Sequence, places: int, config: SchedulerConfig) -> str:
    """What is wrong with one sequence, "" if nothing is."""
    runs = sequence.state is State.RUNNING
    swapped = bool(sequence.host_blocks)
    if places != (0 if sequence.state is State.PAUSED else 1):
        return f"is in {places} places"
    if not runs and sequence.blocks:
        return "holds blocks"
    if swapped and sequence.state is not State.PREEMPTED:
        return "is swapped out"
    if not 0 <= sequence.computed < len(sequence.tokens):
        return f"has computed {sequence.computed} of {len(sequence.tokens)}"
    if not runs and not swapped and sequence.computed:
        return "kept a computed count"
    if not sequence.settled <= sequence.computed:
        return f"has settled {sequence.settled}, beyond what is computed"
    if not runs and (sequence.settled != sequence.computed or UNKNOWN_TOKEN in sequence.tokens):
        return "still counts on a step in flight"
    if runs and sequence.computed > len(sequence.blocks) * config.block_size:
        return f"has computed {sequence.computed}, beyond its blocks"
    if sequence.preemptions > config.max_preemptions:
        return f"was preempted {sequence.preemptions} times"
    return ""


def _check_order(scheduler: Scheduler) -> None:
    """Returning sequences stand before newcomers of their priority."""
    newcomers: set[int] = set()
    for sequence in scheduler.queue:
        if sequence.state is State.WAITING:
            newcomers.add(sequence.priority)
        else:
            if sequence.priority in newcomers:
                raise InvariantViolation(
                    f"preempted sequence {sequence.seq_id} waits behind a newcomer of its priority"
                )


def _check_decodes_served(plan: StepPlan, scheduler: Scheduler, planned: set[int]) -> None:
    # One whose last token is in flight has nothing left to compute.
    decodes = [s for s in scheduler.running if s.remaining == 1 and s.total < s.max_total]
    unserved = [s.seq_id for s in decodes if s.seq_id not in planned]
    _require(
        not unserved or plan.num_decodes >= plan.budget,
        f"step {plan.step}: decodes {unserved[:5]} got no token though the budget had room",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)
