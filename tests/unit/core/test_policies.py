"""Queues, reservations, victims, prefix cache, swap and combinations, each where it matters."""

from __future__ import annotations

import itertools
import random

import pytest

from cluster.core.config import SchedulerConfig
from cluster.core.errors import ConfigError
from cluster.core.invariants import check_idle
from cluster.core.lifecycle import State
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
from cluster.core.preemption import SwapCosts
from cluster.core.queues.fair import FairQueue
from cluster.core.queues.keyed import DeadlineQueue, PriorityQueue
from cluster.core.request import EngineRequest
from cluster.core.reserve import EstimatedPeak, OnDemand
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Policies
from cluster.core.sequence import Sequence
from cluster.core.victims import CheapestRecompute, LastAdmitted, LeastComputed, NewestArrival
from tests.unit.core.support import Driver

CHEAP_COPIES = SwapCosts(prefill_tokens_per_s=1.0, copy_blocks_per_s=1e9)


def make_policies(
    batching: str = "chunked", *, batch_size: int = 16, block_size: int = 16, **options: object
) -> Policies:
    """PolicyChoice(batching, **options).build(...), with sizes that most tests need not name."""
    max_tokens = options.pop("max_tokens", 1 << 30)
    choice = PolicyChoice(batching, **options)  # type: ignore[arg-type]
    return choice.build(
        batch_size=batch_size,
        block_size=block_size,
        max_tokens=max_tokens,  # type: ignore[arg-type]
    )


def sequence(number: int, tokens: int = 4, arrival_s: float = 0.0, **request: object) -> Sequence:
    asked = EngineRequest((1,) * tokens, SamplingParams(max_tokens=20), **request)  # type: ignore[arg-type]
    return Sequence(number, asked, arrival_s)


def driver(batching: str = "chunked", options: dict | None = None, **limits: float) -> Driver:
    policies = make_policies(
        batching,
        batch_size=int(limits.get("max_num_seqs", 8)),
        block_size=int(limits.get("block_size", 4)),
        **{"reservation": "prompt", **(options or {})},
    )
    return Driver(policies, **limits)


# -- combinations ------------------------------------------------------------------------------


def test_every_combination_works_or_is_refused_by_name():
    refused = served = 0
    for names in itertools.product(BATCHING, QUEUES, RESERVATIONS, VICTIMS, PREEMPTIONS):
        for prefix_cache, budget in itertools.product(PREFIX_CACHE, BUDGETS):
            choice = PolicyChoice(
                *names, prefix_cache, budget, host_blocks=8 if names[4] == "swap" else 0
            )
            try:
                policies = choice.build(batch_size=4, block_size=4, max_tokens=16)
            except ConfigError as error:
                said = str(error)
                refused += 1
            else:
                said = ""
            if said:
                assert any(repr(name) in said for name in (*names, budget)), said
                continue
            served += 1
            if served % 40 == 0:
                it = Driver(policies, num_blocks=14, max_num_seqs=4, max_num_batched_tokens=16)
                for number in range(6):
                    it.add(3 + number, 8)
                it.scheduler.close_arrivals()
                it.drain()
                it.assert_exact()
                check_idle(it.scheduler)
    assert served > refused > 0


@pytest.mark.parametrize(
    "field",
    ["batching", "queue", "reservation", "victims", "preemption", "prefix_cache", "budget"],
)
def test_an_unknown_name_is_refused_with_the_known_ones(field):
    choice = PolicyChoice(**{field: "nonsense"})
    with pytest.raises(ConfigError, match=r"unknown .* 'nonsense'; there are "):
        choice.build(batch_size=4, block_size=4, max_tokens=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": "dynamic", "max_queue_delay_s": -1.0}, "max_queue_delay_s"),
        ({"batching": "dynamic", "max_queue_delay_s": float("nan")}, "max_queue_delay_s"),
        ({"queue": "priority", "aging_s": 0.0}, "aging_s"),
        ({"queue": "deadline", "default_ttft_objective_s": float("nan")}, "default_ttft_obj"),
        ({"queue": "fair", "fair_quantum": 0}, "quantum"),
        ({"preemption": "swap"}, "host_blocks must be at least 1"),
        ({"host_blocks": 5}, "preemption is 'recompute'"),
        ({"host_blocks": -1}, "host_blocks must be at least 0"),
        # Also where the chosen policies do not look at them: somebody meant something by it.
        ({"aging_s": float("nan")}, "aging_s must be at least"),
        ({"itl_objective_s": float("nan")}, "itl_objective_s must be at least"),
        ({"budget": "itl", "itl_objective_s": 0.0}, "itl_objective_s"),
        ({"budget": "itl", "batching": "static"}, "'itl'"),
        ({"queue": "priority", "batching": "static"}, "'priority'"),
    ],
)
def test_impossible_numbers_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        make_policies(**options)


# -- batching ----------------------------------------------------------------------------------


def test_static_waits_for_a_full_batch_and_pads_until_its_longest_ends():
    it = driver("static", max_num_seqs=3, max_num_batched_tokens=64)
    short, long = it.add(4, 2), it.add(5, 6)
    assert it.step() is None
    assert it.scheduler.wait_cause == "2 of 3 members of a batch are here"
    third, late = it.add(3, 4), it.add(2, 2)
    plans = []
    while late not in it.finished:
        plan = it.step()
        if plan is None:
            it.scheduler.close_arrivals()
            continue
        plans.append([row.seq_id for row in plan.rows])
    # Every step of the batch has all three rows, though the shortest ends after two tokens.
    assert plans[:6] == [[short, long, third]] + [plans[1]] * 0 + plans[1:6]
    assert all(set(rows) == {short, long, third} for rows in plans[:6])
    assert set(plans[6]) == {late}
    it.assert_exact()
    assert it.scheduler.counters.padded_tokens == 4 + 2
    check_idle(it.scheduler)


def test_dynamic_starts_a_partial_batch_when_the_oldest_has_waited():
    it = driver("dynamic", {"max_queue_delay_s": 0.05}, max_num_seqs=4)
    it.add(4, 3)
    assert it.scheduler.plan(now=0.0) is None
    assert it.scheduler.next_wake_s == pytest.approx(0.05)
    assert it.scheduler.plan(now=0.049) is None
    assert it.scheduler.plan(now=0.05) is not None


def test_prefill_first_lets_decodes_wait_and_fused_does_not():
    for batching, waits in (("continuous", True), ("fused", False), ("chunked", False)):
        it = driver(batching, num_blocks=200)
        decoding = it.add(4, 30)
        it.step()
        newcomer = it.add(40, 5)
        plan = it.step()
        assert plan is not None
        assert (decoding not in {row.seq_id for row in plan.rows}) is waits, batching
        assert newcomer in {row.seq_id for row in plan.rows}


def test_fused_takes_whole_prompts_only_unless_one_is_too_long_for_any_step():
    it = driver("fused", max_num_batched_tokens=20, num_blocks=200)
    it.add(12, 5)
    second = it.add(12, 5)
    plan = it.step()
    assert plan is not None
    assert [row.count for row in plan.rows] == [12]
    plan = it.step()
    assert plan is not None
    assert (second, 12) in [(row.seq_id, row.count) for row in plan.rows]
    giant = it.add(70, 3)
    it.drain()
    assert giant in it.finished
    it.assert_exact()


# -- queues ------------------------------------------------------------------------------------


def test_a_high_priority_preempts_the_lowest_and_equals_do_not_swap():
    """R07: K = 4 long low-priority sequences run, one high-priority request arrives."""
    it = driver(options={"queue": "priority", "aging_s": 1e6}, max_num_seqs=4, num_blocks=400)
    low = [
        it.submit(EngineRequest((n, n), SamplingParams(max_tokens=200, temperature=0.0)))
        for n in range(1, 5)
    ]
    it.step()
    high = it.submit(
        EngineRequest((9, 9, 9), SamplingParams(max_tokens=5, temperature=0.0), priority=5)
    )
    plan = it.step()
    assert plan is not None
    assert high in {row.seq_id for row in plan.rows}
    assert it.scheduler.counters.preemptions == 1
    assert it.scheduler.get(low[3]).state is State.PREEMPTED
    it.submit(EngineRequest((8,), SamplingParams(max_tokens=5, temperature=0.0), priority=0))
    for _ in range(20):
        it.step()
    assert it.scheduler.counters.preemptions == 1, "equals swapped places"
    it.drain()
    it.assert_exact()


def test_a_victim_never_outranks_the_one_it_makes_room_for():
    for victims in VICTIMS:
        it = driver(
            options={"queue": "priority", "aging_s": 1e6, "victims": victims},
            num_blocks=12,
            max_num_seqs=8,
        )
        sampling = SamplingParams(max_tokens=24, temperature=0.0)
        for number in range(6):
            it.submit(EngineRequest((number,) * 6, sampling, priority=number % 3))
        while len(it.scheduler):
            before = {s.seq_id: s.preemptions for s in it.scheduler.sequences()}
            it.step()
            for loser in it.scheduler.sequences():
                if loser.preemptions > before[loser.seq_id]:
                    lower = [
                        s.seq_id
                        for s in it.scheduler.running
                        if s.priority < loser.priority and s.preemptions < 4
                    ]
                    assert not lower, f"{victims}: {loser.seq_id} gave way, {lower} run on"
        it.assert_exact()


def test_aging_lets_the_lowest_priority_complete_under_a_stream_of_higher_ones():
    it = driver(options={"queue": "priority", "aging_s": 20.0}, max_num_seqs=1, num_blocks=100)
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    low = it.scheduler.add(EngineRequest((1, 2), sampling), now=0.0).seq_id
    it.requests[low], it.outputs[low] = EngineRequest((1, 2), sampling), []
    for number in range(200):
        request = EngineRequest((3, number % 90), sampling, priority=2)
        seq_id = it.scheduler.add(request, now=float(len(it.plans))).seq_id
        it.requests[seq_id], it.outputs[seq_id] = request, []
        for _ in range(4):
            it.step()
        if low in it.finished:
            break
    assert low in it.finished
    assert number > 2, "priority made no difference at all"


def test_priority_order_is_level_then_age():
    queue = PriorityQueue(aging_s=10.0)
    old_low = sequence(1, arrival_s=0.0, priority=0)
    new_high = sequence(2, arrival_s=5.0, priority=1)
    late_high = sequence(3, arrival_s=20.0, priority=1)
    for item in (late_high, old_low, new_high):
        queue.push(item)
    # new_high: 5 s younger, one level (10 s) above. late_high: 20 s younger: too late for that.
    assert [s.seq_id for s in queue] == [2, 1, 3]
    assert queue.outranks(new_high, old_low)
    assert not queue.outranks(late_high, old_low)
    assert not queue.outranks(old_low, new_high)


def test_earliest_deadline_goes_first_and_the_preempted_before_all():
    queue = DeadlineQueue(default_objective_s=1.0)
    relaxed = sequence(1, arrival_s=0.0, ttft_objective_s=10.0)
    plain = sequence(2, arrival_s=0.5)
    urgent = sequence(3, arrival_s=0.6, ttft_objective_s=0.1)
    preempted = sequence(4, arrival_s=50.0)
    for item in (relaxed, plain, urgent):
        queue.push(item)
    queue.push_returning(preempted)
    assert [s.seq_id for s in queue] == [4, 3, 2, 1]
    assert queue.peek() is preempted


def test_tenants_share_by_tokens_not_by_requests():
    queue = FairQueue(quantum=10)
    number = 0
    for _ in range(50):
        number += 1
        queue.push(sequence(number, tokens=40, tenant="big"))
    for _ in range(400):
        number += 1
        queue.push(sequence(number, tokens=5, tenant="small"))
    served = {"big": 0, "small": 0}
    while served["big"] + served["small"] < 1600:
        head = queue.peek()
        assert head is not None
        assert next(iter(queue)) is head
        queue.take(head)
        served[head.tenant] += head.total
    assert abs(served["big"] - served["small"]) <= 80


def test_emitted_tokens_are_charged_too():
    queue = FairQueue(quantum=10)
    talkative, quiet = sequence(1, tenant="talkative"), sequence(2, tenant="quiet")
    queue.push(talkative)
    queue.take(talkative)
    queue.charge(talkative, 1000)
    order = []
    for number in range(3, 40):
        queue.push(sequence(number, tokens=10, tenant="talkative" if number % 2 else "quiet"))
    queue.push(quiet)
    while (head := queue.peek()) is not None:
        queue.take(head)
        order.append(head.tenant)
    assert order[:18] == ["quiet"] * 18


@pytest.mark.parametrize("name", QUEUES)
def test_iteration_shows_the_order_in_which_all_would_be_taken(name):
    rng = random.Random(5)
    for _ in range(50):
        queue = (
            PolicyChoice(queue=name, fair_quantum=7)
            .build(batch_size=1, block_size=1, max_tokens=1)
            .queue
        )
        for number in range(1, 15):
            item = sequence(
                number,
                tokens=rng.randint(1, 30),
                arrival_s=rng.random() * 50,
                tenant=rng.choice("abc"),
                priority=rng.randint(0, 2),
                ttft_objective_s=rng.choice([None, 0.5]),
            )
            (queue.push if rng.random() < 0.8 else queue.push_returning)(item)
        shown = [s.seq_id for s in queue]
        taken = []
        while (head := queue.peek()) is not None:
            queue.take(head)
            taken.append(head.seq_id)
        assert taken == shown
        assert (len(queue), queue.tokens) == (0, 0)


# -- reservations and victims ------------------------------------------------------------------


def test_nobody_comes_in_within_the_step_that_preempts():
    """The freed blocks are for those who run; a newcomer would take them."""
    it = driver(num_blocks=12, max_num_seqs=8)
    for _ in range(3):
        it.add(8, 20)
    preempted = 0
    while len(it.scheduler):
        if len(it.scheduler.queue) < 2:
            if len(it.requests) > 40:
                break
            it.add(1, 2)
        before = it.scheduler.counters.preemptions
        plan = it.step()
        assert plan is not None
        if it.scheduler.counters.preemptions > before:
            preempted += 1
            assert plan.admitted == []
    assert preempted > 0
    it.drain()
    it.assert_exact()


def test_reservations_differ_in_who_comes_in():
    """Four requests of 8 + 24 tokens; a pool of 16 blocks of 4 tokens."""
    together = {}
    for name in RESERVATIONS:
        it = driver(options={"reservation": name}, num_blocks=16, max_num_seqs=8)
        for _ in range(4):
            it.add(8, 24)
        it.step()
        together[name] = len(it.scheduler.running)
        it.drain()
        it.assert_exact()
        if name in ("worst-case", "estimated-peak"):
            assert it.scheduler.counters.preemptions == 0, name
        else:
            assert it.scheduler.counters.preemptions > 0, name
    assert together == {"on-demand": 4, "prompt": 4, "worst-case": 2, "estimated-peak": 2}


def test_the_largest_max_tokens_does_not_block_the_rest_by_default():
    """R10: prompt 10, max_tokens = maximum, with the default policies and a pool of 8,192."""
    policies = PolicyChoice().build(batch_size=8, block_size=16, max_tokens=256)
    it = Driver(policies, block_size=16, num_blocks=512, max_num_batched_tokens=256)
    asked = [it.add(10, 8182), *(it.add(100, 50) for _ in range(4))]
    plan = it.step()
    assert plan is not None
    assert {row.seq_id for row in plan.rows} >= set(asked[:3])
    it.step()
    it.step()
    assert len(it.scheduler.running) == 5


def test_the_estimated_peak_learns_how_long_outputs_are():
    policy = EstimatedPeak()
    running = [sequence(n, tokens=8) for n in range(1, 4)]
    before = policy.demand(sequence(9, tokens=8), running, 4).free
    for number in range(50):
        done = sequence(100 + number)
        done.tokens.extend([0, 0])
        policy.observe(done)
    assert policy.demand(sequence(9, tokens=8), running, 4).free < before


def test_on_demand_counts_what_others_still_need_for_their_prompts():
    half_way = sequence(1, tokens=40)
    half_way.grant([1, 2], 4)
    assert OnDemand().demand(sequence(2, tokens=8), [half_way], 4).free == 2 + 8


def test_each_victim_policy_has_its_own_victim():
    old, long, late = sequence(1), sequence(2), sequence(3)
    for item, computed, blocks, admission in (
        (old, 30, 9, 3),
        (long, 80, 20, 2),
        (late, 40, 10, 1),
    ):
        item.computed, item.admission = computed, admission
        item.blocks = list(range(blocks))
    candidates = [old, long, late]
    assert LastAdmitted().choose(candidates) is old
    assert NewestArrival().choose(candidates) is late
    assert LeastComputed().choose(candidates) is old
    assert CheapestRecompute().choose(candidates) is old
    late.blocks = list(range(30))
    assert CheapestRecompute().choose(candidates) is late


# -- prefix cache ------------------------------------------------------------------------------


def cached(**limits: float) -> Driver:
    return driver(options={"prefix_cache": "on"}, **limits)


def request(prompt: list[int], tenant: str = "", max_tokens: int = 6) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(tuple(prompt), sampling, tenant=tenant)


def computed_for(it: Driver, asked: EngineRequest) -> int:
    """Prompt tokens that the request really had to compute."""
    seq_id = it.submit(asked)
    it.drain()
    return sum(
        r.count
        for p in it.plans
        for r in p.rows
        if r.seq_id == seq_id and r.start < len(asked.prompt_ids)
    )


def test_a_repeated_prompt_computes_one_token_only():
    it = cached(num_blocks=100)
    prompt = list(range(1, 25))
    assert computed_for(it, request(prompt)) == 24
    assert computed_for(it, request(prompt)) == 4  # the last whole block holds the last token
    longer = [*prompt, 70, 71, 72]
    assert computed_for(it, request(longer)) == 3
    it.assert_exact()


def test_prompts_that_differ_in_one_token_share_only_what_precedes_it():
    """R18: differing in the last token of a block; same last block after another first block."""
    it = cached(num_blocks=100)
    first = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    computed_for(it, request(first))
    other_end = [1, 2, 3, 4, 5, 6, 7, 80, 9, 10, 11, 12, 13]
    assert computed_for(it, request(other_end)) == 9
    other_start = [90, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert computed_for(it, request(other_start)) == 13
    it.assert_exact()


def test_tenants_never_share():
    """R18: no foreign KV ever, and no way to probe for another tenant's prompt."""
    it = cached(num_blocks=100)
    prompt = list(range(1, 22))
    computed_for(it, request(prompt, tenant="a"))
    assert computed_for(it, request(prompt, tenant="b")) == 21
    assert computed_for(it, request(prompt, tenant="a")) == 1
    it.assert_exact()


def test_running_sequences_share_blocks_and_a_burst_computes_its_prefix_once():
    it = cached(num_blocks=100, max_num_batched_tokens=16)
    prompt = list(range(1, 34))
    samples = [
        it.submit(
            EngineRequest(tuple(prompt), SamplingParams(max_tokens=6, temperature=1.0, seed=seed))
        )
        for seed in range(4)
    ]
    it.drain()
    it.assert_exact()
    prefill = sum(row.count for plan in it.plans for row in plan.rows if row.start < len(prompt))
    assert prefill <= len(prompt) + 3 * 4, "the prompt was computed more than once"
    assert len({tuple(it.outputs[s]) for s in samples}) > 1
    check_idle(it.scheduler)


def test_samples_of_one_prompt_copy_its_partly_filled_last_block():
    """Copy on write for n > 1: the second sample computes the last prompt token, nothing else."""
    it = cached(num_blocks=100)
    prompt = list(range(1, 12))  # two whole blocks and three tokens
    first = it.submit(request(prompt, max_tokens=12))
    it.step()
    it.step()
    second = it.submit(request(prompt, max_tokens=12))
    plan = it.step()
    assert plan is not None
    (row,) = [r for r in plan.rows if r.seq_id == second]
    assert (row.start, row.count) == (10, 1)
    (copy,) = plan.copies
    assert copy.source == it.scheduler.get(first).blocks[2]
    assert copy.target == it.scheduler.get(second).blocks[2]
    it.drain()
    it.assert_exact()


def test_hits_under_eviction_and_churn_equal_misses():
    rng = random.Random(18)
    it = cached(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=16)
    stems = [[rng.randrange(90) for _ in range(16)] for _ in range(5)]
    for number in range(300):
        stem = rng.choice(stems)
        tail = [rng.randrange(90) for _ in range(rng.randint(1, 6))]
        it.submit(request(stem[: rng.randint(0, 16)] + tail, max_tokens=rng.randint(1, 8)))
        if number % 3 == 0:
            it.step()
    it.drain()
    it.assert_exact()
    assert it.scheduler.counters.prefix_hit_tokens > 500
    check_idle(it.scheduler)


# -- swap --------------------------------------------------------------------------------------


def swapping(host_blocks: int, costs: SwapCosts = CHEAP_COPIES, **limits: float) -> Driver:
    options = {"preemption": "swap", "host_blocks": host_blocks, "swap_costs": costs}
    return driver(options=options, **limits)


def test_a_swapped_victim_comes_back_without_computing_again():
    it = swapping(host_blocks=32, num_blocks=10, max_num_seqs=4)
    for _ in range(3):
        it.add(8, 16)
    it.drain()
    it.assert_exact()
    counters = it.scheduler.counters
    assert counters.swapped_blocks > 0
    assert counters.recomputed_tokens == 0
    check_idle(it.scheduler)


def test_a_victim_is_recomputed_when_host_memory_is_full_or_copying_is_slower():
    full = swapping(host_blocks=1, num_blocks=10, max_num_seqs=4)
    slow = swapping(32, SwapCosts(1e9, 1.0), num_blocks=10, max_num_seqs=4)
    for it in (full, slow):
        for _ in range(3):
            it.add(8, 16)
        it.drain()
        it.assert_exact()
        assert it.scheduler.counters.swapped_blocks == 0
        assert it.scheduler.counters.recomputed_tokens > 0


def test_aborting_a_swapped_sequence_frees_its_host_memory():
    it = swapping(host_blocks=32, num_blocks=10, max_num_seqs=4)
    ids = [it.add(8, 16) for _ in range(3)]
    while it.scheduler.kv.host_used == 0:
        it.step()
    for seq_id in ids:
        it.scheduler.abort(seq_id)
    check_idle(it.scheduler)


# -- budget ------------------------------------------------------------------------------------


def test_a_budget_below_the_decodes_is_never_exceeded():
    config = SchedulerConfig(8, 4, 4, 64, 256)
    it = driver(options={"budget": "itl", "itl_objective_s": 0.001, "max_tokens": 8}, num_blocks=64)
    for number in range(6):
        it.add(20 + number, 10)
    it.drain()
    it.assert_exact()
    assert all(p.num_tokens <= p.budget <= 64 for p in it.plans)
    assert config.max_sequence_len == 256
