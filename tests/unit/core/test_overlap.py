"""The next step planned before the result of the one before: what lags, and what must wait."""

from __future__ import annotations

import pytest

from cluster.core.batching.static import StaticBatching
from cluster.core.errors import InvariantViolation
from cluster.core.invariants import check_idle, check_plan, check_scheduler
from cluster.core.lifecycle import State
from cluster.core.outcome import FinishReason
from cluster.core.plan import StepPlan, StepResult
from cluster.core.prefix import PrefixCache
from cluster.core.queues.keyed import PriorityQueue
from cluster.core.request import EngineRequest
from cluster.core.reserve import KnownTokens
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Policies
from cluster.core.sequence import UNKNOWN_TOKEN
from tests.unit.core.support import Driver


def two_steps(driver: Driver) -> tuple[StepPlan, StepPlan]:
    first, second = driver.scheduler.plan(0.0), driver.scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    for plan in (first, second):
        check_plan(plan, driver.scheduler)
    check_scheduler(driver.scheduler)
    return first, second


def land(driver: Driver, plan: StepPlan):
    committed = driver.scheduler.commit(driver.executor.submit(plan).wait())
    check_scheduler(driver.scheduler)
    return committed


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(r.seq_id, r.start, r.count, r.samples) for r in plan.rows]


def test_a_decode_goes_on_before_its_token_is_known():
    driver = Driver()
    seq_id = driver.add(5, 5)
    first, second = two_steps(driver)
    assert rows(first) == [(seq_id, 0, 5, True)]
    assert rows(second) == [(seq_id, 5, 1, True)]
    sequence = driver.scheduler.get(seq_id)
    assert sequence.tokens[5:] == [UNKNOWN_TOKEN] * 2
    assert (sequence.computed, sequence.settled) == (6, 0)
    tokens = [land(driver, plan).outcomes[0].token_id for plan in (first, second)]
    assert tokens == driver.expected(seq_id)[:2]
    assert sequence.tokens[5:] == tokens


def test_a_long_prompt_goes_on_chunk_by_chunk():
    driver = Driver(max_num_batched_tokens=4)
    seq_id = driver.add(10, 2)
    first, second = two_steps(driver)
    assert rows(first) + rows(second) == [(seq_id, 0, 4, False), (seq_id, 4, 4, False)]


def test_a_stop_token_wastes_one_row_and_its_result_is_passed_over():
    driver = Driver()
    free = driver.scheduler.kv.free
    plain = driver.add(5, 9)
    stop = driver.expected(plain)[0]
    driver.scheduler.abort(plain)
    seq_id = driver.add(5, 9, stop_token_ids=(stop,))
    first, second = two_steps(driver)
    (outcome,) = land(driver, first).outcomes
    assert outcome.finish is FinishReason.STOP
    assert driver.scheduler.kv.free < free, "the wasted row still writes"
    assert land(driver, second).outcomes == []
    assert driver.scheduler.counters.wasted_rows == 1
    assert driver.scheduler.counters.emitted_tokens == 1
    assert driver.scheduler.get(seq_id) is None
    check_idle(driver.scheduler)


def test_max_tokens_is_known_beforehand_and_wastes_nothing():
    driver = Driver()
    driver.add(5, 1)
    other = driver.add(5, 3)
    first, second = two_steps(driver)
    assert len(first.rows) == 2
    assert [row.seq_id for row in second.rows] == [other]
    land(driver, first)
    land(driver, second)
    assert driver.scheduler.counters.wasted_rows == 0


def test_a_place_is_taken_until_the_last_token_is_here():
    """The workers hold a sequence until it is released, which is after its last commit."""
    driver = Driver(max_num_seqs=1)
    driver.add(5, 1)
    driver.add(6, 1)
    first = driver.scheduler.plan(0.0)
    assert driver.scheduler.plan(0.0) is None
    land(driver, first)
    assert driver.scheduler.plan(0.0) is not None


def test_preemption_waits_until_nothing_is_in_flight():
    driver = Driver(num_blocks=6)
    old, new = driver.add(8, 16), driver.add(8, 16)
    while driver.scheduler.counters.steps < 2:
        driver.step()
    first = driver.scheduler.plan(0.0)
    assert first is not None
    for _ in range(8):
        second = driver.scheduler.plan(0.0)
        if second is None:
            break
        land(driver, first)
        first = second
    assert second is None
    assert "in flight" in driver.scheduler.wait_cause
    assert driver.scheduler.counters.preemptions == 0
    land(driver, first)
    assert [row.seq_id for row in driver.scheduler.plan(0.0).rows] == [old]
    assert driver.scheduler.get(new).state is State.PREEMPTED


def test_rank_preemption_waits_as_well():
    driver = Driver(Policies(queue=PriorityQueue(1e6), reservation=KnownTokens()), max_num_seqs=1)
    low = driver.add(5, 9)
    first = driver.scheduler.plan(0.0)
    high = driver.submit(EngineRequest((1, 2), SamplingParams(max_tokens=2), (), 5))
    assert driver.scheduler.plan(0.0) is None
    land(driver, first)
    assert [row.seq_id for row in driver.scheduler.plan(0.0).rows] == [high]
    assert driver.scheduler.get(low).state is State.PREEMPTED


def test_a_sequence_that_left_and_came_back_takes_no_result_of_its_first_stay():
    driver = Driver()
    seq_id = driver.add(5, 5)
    first = driver.scheduler.plan(0.0)
    driver.scheduler.pause(seq_id)
    driver.scheduler.resume(seq_id)
    second = driver.scheduler.plan(0.0)
    assert second.released == [seq_id]
    assert [new.token_ids for new in second.admitted] == [driver.scheduler.get(seq_id).tokens[:5]]
    assert land(driver, first).outcomes == []
    assert driver.scheduler.get(seq_id).settled == 0
    (outcome,) = land(driver, second).outcomes
    assert (outcome.index, outcome.token_id) == (0, driver.expected(seq_id)[0])
    assert driver.scheduler.counters.wasted_rows == 1


def test_an_abort_keeps_the_blocks_until_the_newest_step_is_settled():
    driver = Driver(num_blocks=4)
    victim = driver.add(7, 9)
    first, second = two_steps(driver)
    driver.scheduler.abort(victim)
    assert driver.scheduler.kv.free == 2
    land(driver, first)
    assert driver.scheduler.kv.free == 2
    land(driver, second)
    assert driver.scheduler.kv.free == 4


def test_blocks_are_shared_once_their_ids_are_known():
    driver = Driver(Policies(prefix=PrefixCache(4), reservation=KnownTokens()))
    prompt = tuple(range(9))
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    driver.submit(EngineRequest(prompt, sampling))
    first = driver.scheduler.plan(0.0)
    twin = driver.submit(EngineRequest(prompt, sampling))
    second = driver.scheduler.plan(0.0)
    assert twin not in [row.seq_id for row in second.rows], "its prefix is just being computed"
    land(driver, first)
    third = driver.scheduler.plan(0.0)
    assert (twin, 8, 1, True) in rows(third)
    for plan in (second, third):
        land(driver, plan)


def test_a_failed_row_ends_its_sequence_though_it_has_another():
    driver = Driver()
    seq_id = driver.add(5, 5)
    first, second = two_steps(driver)
    committed = driver.scheduler.commit(StepResult(first.step, [-1], failed={seq_id: "NaN"}))
    assert committed.failures == [(seq_id, "NaN")]
    committed = driver.scheduler.commit(StepResult(second.step, [-1], failed={seq_id: "NaN"}))
    assert (committed.outcomes, committed.failures) == ([], [])
    check_idle(driver.scheduler)


def test_results_come_in_order():
    driver = Driver()
    driver.add(5, 5)
    _, second = two_steps(driver)
    with pytest.raises(InvariantViolation, match="no plan in flight"):
        driver.scheduler.commit(StepResult(second.step, [1]))


def test_a_static_batch_starts_after_the_last_token_of_the_one_before():
    driver = Driver(
        Policies(batching=StaticBatching(2), reservation=KnownTokens()),
        max_num_seqs=2,
        num_blocks=32,
    )
    for _ in range(4):
        driver.add(4, 1)
    first = driver.scheduler.plan(0.0)
    assert len(first.rows) == 2
    assert driver.scheduler.plan(0.0) is None
    land(driver, first)
    assert len(driver.scheduler.plan(0.0).rows) == 2
