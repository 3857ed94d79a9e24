"""What the scheduler promises, one scenario each; the random lives are in tests/property."""

from __future__ import annotations

import random

import pytest

from cluster.core.budget import FixedBudget
from cluster.core.errors import InvalidRequest, InvariantViolation
from cluster.core.invariants import check_idle
from cluster.core.lifecycle import State
from cluster.core.outcome import FinishReason
from cluster.core.plan import StepResult
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from tests.unit.core.support import VOCAB, Driver


def test_decodes_come_first_and_a_prompt_takes_the_rest_of_the_budget():
    driver = Driver(max_num_batched_tokens=10)
    first, second = driver.add(4, 20), driver.add(3, 20)
    driver.step()
    long = driver.add(30, 5)
    plan = driver.step()
    assert plan is not None
    assert [(row.seq_id, row.count, row.samples) for row in plan.rows] == [
        (first, 1, True),
        (second, 1, True),
        (long, 8, False),
    ]
    assert plan.num_decodes == 2
    assert plan.num_tokens == 10


def test_every_running_decode_gets_its_token_beside_long_prompts():
    """R08: the gap bound does not depend on the prompts' length."""
    driver = Driver(
        max_num_batched_tokens=64, max_num_seqs=64, num_blocks=20_000, max_model_len=8192
    )
    decodes = [driver.add(4, 100) for _ in range(30)]
    for _ in range(10):
        driver.step()
    for _ in range(5):
        driver.add(4000, 2)
    for _ in range(60):
        plan = driver.step()
        assert plan is not None
        served = {row.seq_id for row in plan.rows if row.samples}
        assert set(decodes) <= served
        assert plan.num_tokens <= 64


def test_more_decodes_than_budget_rotate():
    """R09: budget 8 with 20 decodes (reached when a budget shrinks under running sequences)."""
    driver = Driver(max_num_batched_tokens=64, max_num_seqs=20, num_blocks=400)
    ids = [driver.add(1, 60) for _ in range(20)]
    driver.step()
    driver.scheduler.budget = FixedBudget(8)
    served = dict.fromkeys(ids, 0)
    for _ in range(25):
        plan = driver.step()
        assert plan is not None
        assert plan.num_tokens == 8
        for row in plan.rows:
            served[row.seq_id] += 1
    assert max(served.values()) - min(served.values()) <= 1
    driver.drain()
    driver.assert_exact()


def test_a_prompt_beyond_the_pool_is_refused_at_once_and_others_are_served():
    """R01: pool of 64 blocks of 16, prompt of 1,100 tokens."""
    driver = Driver(block_size=16, num_blocks=64, max_num_batched_tokens=256)
    with pytest.raises(InvalidRequest, match="1100 tokens leave no room") as refusal:
        driver.add(1100, 10)
    assert "1024" in str(refusal.value)
    for _ in range(5):
        driver.add(20, 5)
    driver.drain()
    driver.assert_exact()
    check_idle(driver.scheduler)


def test_max_tokens_beyond_the_limit_names_what_would_fit():
    driver = Driver(max_model_len=100)
    with pytest.raises(InvalidRequest, match="max_tokens may be 90 here"):
        driver.add(10, 91)
    driver.add(10, 90)


def test_no_worst_case_reservation_by_default():
    """R10: a tiny prompt with the largest max_tokens does not block the rest."""
    driver = Driver(num_blocks=16, max_num_batched_tokens=64)
    greedy_one = driver.add(10, 54)
    others = [driver.add(4, 3) for _ in range(4)]
    plan = driver.step()
    assert plan is not None
    assert {row.seq_id for row in plan.rows} == {greedy_one, *others}
    driver.drain()
    driver.assert_exact()


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("j", range(7))
def test_preemption_at_every_offset_of_a_block_changes_nothing(k, j):
    """R13: prompt = k x block size, preempted at output j."""
    block_size = 3
    driver = Driver(block_size=block_size, num_blocks=40, max_num_batched_tokens=7)
    seq_id = driver.add(k * block_size, 12)
    while len(driver.outputs[seq_id]) < j:
        driver.step()
    if driver.scheduler.get(seq_id).state is State.RUNNING:
        driver.scheduler._preempt(driver.scheduler.get(seq_id))
    driver.drain()
    driver.assert_exact()


def test_the_newest_gives_way_and_comes_back_before_newcomers():
    """R06: the preempted are not overtaken."""
    driver = Driver(num_blocks=6, max_num_seqs=8)
    old, new = driver.add(8, 16), driver.add(8, 16)
    while driver.scheduler.counters.preemptions == 0:
        driver.step()
    assert driver.scheduler.get(new).state is State.PREEMPTED
    late = driver.add(1, 2)
    order = []
    while len(driver.scheduler):
        plan = driver.step()
        order += [admitted.seq_id for admitted in plan.admitted]
    assert order.index(new) < order.index(late)
    assert old in driver.finished
    driver.assert_exact()


def test_preemption_takes_one_victim_when_one_is_enough():
    """R05: the minimum is preempted."""
    driver = Driver(num_blocks=12, max_num_seqs=8)
    for _ in range(4):
        driver.add(8, 12)
    while driver.scheduler.counters.preemptions == 0:
        driver.step()
    assert driver.scheduler.counters.preemptions == 1
    assert len(driver.scheduler.running) == 3


def test_a_sequence_is_preempted_at_most_max_preemptions_times():
    driver = Driver(num_blocks=14, max_num_seqs=8, max_preemptions=2)
    for n in range(8):
        driver.add(6 + n % 3, 30)
    seen: dict[int, int] = {}
    while driver.step() is not None:
        for sequence in driver.scheduler.sequences():
            seen[sequence.seq_id] = max(seen.get(sequence.seq_id, 0), sequence.preemptions)
    assert max(seen.values()) == 2
    driver.assert_exact()


def test_max_preemptions_zero_never_preempts():
    driver = Driver(num_blocks=14, max_num_seqs=8, max_preemptions=0)
    for _ in range(8):
        driver.add(6, 30)
    driver.drain()
    assert driver.scheduler.counters.preemptions == 0
    driver.assert_exact()


def test_two_prompts_larger_than_the_pool_together_make_monotone_progress():
    """R04: two prompts of 3x the budget, pool = 1.2 prompts."""
    driver = Driver(max_num_batched_tokens=16, num_blocks=15, block_size=4, watermark=0.05)
    driver.add(48, 8)
    driver.add(48, 8)
    emitted = 0
    for _ in range(200):
        if driver.step() is None:
            break
        now = sum(map(len, driver.outputs.values()))
        assert now >= emitted
        emitted = now
    assert emitted == 16
    assert driver.scheduler.counters.preemptions == 0
    driver.assert_exact()


def test_the_watermark_keeps_blocks_free_at_admission_but_never_locks_out():
    driver = Driver(num_blocks=20, watermark=0.5)
    big = driver.add(60, 10)  # 15 of 20 blocks: over the watermark, but alone
    small = driver.add(4, 4)
    plan = driver.step()
    assert plan is not None
    assert [row.seq_id for row in plan.rows] == [big]
    assert "watermark 10" in driver.scheduler.wait_cause
    driver.drain()
    assert {big, small} == set(driver.finished)
    driver.assert_exact()


def test_abort_while_the_step_runs_keeps_its_blocks_until_the_commit():
    """R05, R32: blocks that a running step writes to are not handed out; its tokens are void."""
    driver = Driver(num_blocks=4)
    victim = driver.add(8, 4)
    plan = driver.scheduler.plan(0.0)
    assert driver.scheduler.abort(victim)
    assert driver.scheduler.kv.pool.free == 2
    assert len(driver.scheduler.kv.pending) == 2
    result = driver.executor.submit(plan).wait()
    assert driver.scheduler.commit(result).outcomes == []
    check_idle(driver.scheduler)
    driver.add(8, 8)
    follow_up = driver.step()
    assert victim in follow_up.released


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "paused"])
def test_abort_works_in_every_state_and_is_idempotent(state):
    """R32, R33."""
    driver = Driver(num_blocks=8)
    seq_id = driver.add(8, 8)
    if state != "waiting":
        driver.step()
    if state == "preempted":
        driver.scheduler._preempt(driver.scheduler.get(seq_id))
    if state == "paused":
        assert driver.scheduler.pause(seq_id)
        assert not driver.scheduler.pause(seq_id)
    assert driver.scheduler.get(seq_id).state.value == state
    assert driver.scheduler.abort(seq_id)
    assert not driver.scheduler.abort(seq_id)
    assert not driver.scheduler.abort(12345)
    check_idle(driver.scheduler)


def test_a_paused_sequence_waits_without_blocks_and_goes_on_exactly():
    driver = Driver(num_blocks=16)
    seq_id = driver.add(8, 12)
    for _ in range(4):
        driver.step()
    driver.scheduler.pause(seq_id)
    assert driver.step() is None
    assert driver.scheduler.kv.pool.held == 0
    assert driver.scheduler.resume(seq_id)
    assert not driver.scheduler.resume(seq_id)
    driver.drain()
    driver.assert_exact()
    assert driver.scheduler.counters.recomputed_tokens > 0


def test_a_replay_goes_on_at_the_next_index():
    driver = Driver()
    fresh = driver.add(9, 20, temperature=1.0, seed=7)
    driver.drain()
    full = driver.outputs[fresh]
    request = driver.requests[fresh]
    for cut in range(1, 20):
        driver.submit(EngineRequest(request.prompt_ids, request.sampling, tuple(full[:cut])))
    driver.drain()
    driver.assert_exact()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_exactly_max_tokens_are_emitted(max_tokens):
    """R25: also with min_tokens = max_tokens and a stop token that would come at once."""
    driver = Driver()
    plain = driver.add(5, max_tokens)
    driver.drain()
    assert len(driver.outputs[plain]) == max_tokens
    assert driver.finished[plain].finish is FinishReason.LENGTH
    everything = tuple(range(60))
    held = driver.add(5, max_tokens, min_tokens=max_tokens, stop_token_ids=everything)
    driver.drain()
    assert len(driver.outputs[held]) == max_tokens


def test_a_stop_token_ends_the_sequence_and_is_emitted():
    driver = Driver()
    probe = driver.add(5, 10)
    driver.drain()
    stop = driver.outputs[probe][3]
    cut = driver.outputs[probe].index(stop)
    stopped = driver.add(5, 10, stop_token_ids=(stop,))
    driver.drain()
    assert driver.outputs[stopped] == driver.outputs[probe][: cut + 1]
    assert driver.finished[stopped].finish is FinishReason.STOP


def test_a_row_without_a_token_fails_its_own_sequence_only():
    driver = Driver()
    bad, good = driver.add(5, 10), driver.add(6, 10)
    plan = driver.scheduler.plan(0.0)
    result = driver.executor.submit(plan).wait()
    result = StepResult(plan.step, [-1, result.token_ids[1]], failed={bad: "logits are NaN"})
    committed = driver.scheduler.commit(result)
    assert committed.failures == [(bad, "logits are NaN")]
    driver.outputs[good].append(committed.outcomes[0].token_id)
    del driver.outputs[bad]
    driver.drain()
    driver.assert_exact()
    check_idle(driver.scheduler)


def test_identical_seeded_requests_in_one_batch_are_identical():
    """R20."""
    driver = Driver()
    ids = [driver.add(9, 15, temperature=1.0, seed=3) for _ in range(4)]
    driver.drain()
    assert len({tuple(driver.outputs[i]) for i in ids}) == 1


def test_two_thousand_mixed_requests_leave_nothing_behind():
    """R30: one block lost per request would show."""
    rng = random.Random(30)
    driver = Driver(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=24)
    waiting = 0
    for _ in range(2000):
        driver.add(rng.randint(1, 30), rng.randint(1, 12), temperature=float(rng.random() < 0.5))
        waiting += 1
        if waiting > 20:
            for _ in range(8):
                driver.step()
            waiting = len(driver.scheduler)
        if rng.random() < 0.1 and driver.scheduler.sequences():
            victim = rng.choice(driver.scheduler.sequences()).seq_id
            driver.scheduler.abort(victim)
            del driver.outputs[victim]
    driver.drain()
    driver.assert_exact()
    check_idle(driver.scheduler)
    assert driver.scheduler.counters.preemptions > 0


def test_two_plans_at_a_time_and_only_the_oldest_result():
    driver = Driver()
    driver.add(5, 5)
    plan = driver.scheduler.plan(0.0)
    driver.scheduler.plan(0.0)
    with pytest.raises(InvariantViolation, match="not committed yet"):
        driver.scheduler.plan(0.0)
    with pytest.raises(InvariantViolation, match="no plan in flight"):
        driver.scheduler.commit(StepResult(plan.step + 1, []))


def test_nothing_to_do_is_no_plan():
    driver = Driver()
    assert driver.step() is None
    assert driver.scheduler.counters.steps == 0


def test_a_request_that_is_over_cannot_be_replayed():
    sampling = SamplingParams(max_tokens=3)
    with pytest.raises(InvalidRequest, match="3 tokens are emitted already"):
        EngineRequest((1, 2), sampling, (1, 2, 3))
    with pytest.raises(InvalidRequest, match="at least one token"):
        EngineRequest((), sampling)
    assert VOCAB > 60
