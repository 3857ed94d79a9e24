"""The scheduler's parts, each alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.blocks import BlockPool
from cluster.core.config import SchedulerConfig, WorkerConfig, blocks_for
from cluster.core.errors import ConfigError, IllegalTransition, InvalidRequest, InvariantViolation
from cluster.core.lifecycle import TRANSITIONS, Event, State, advance, mermaid
from cluster.core.queues.fcfs import FcfsQueue
from cluster.core.request import EngineRequest
from cluster.core.sampling import (
    MAX_CHOICES,
    SamplingParams,
    choice_seed,
    choices_violation,
    counter_uniform,
)
from cluster.core.sequence import Sequence

GOOD = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "block_size": 16,
    "num_blocks": 100,
    "max_model_len": 1024,
}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("block_size", -1),
        ("num_blocks", 0),
        ("max_model_len", 1),
        ("max_preemptions", -1),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("watermark", math.nan),
    ],
)
def test_impossible_configuration_is_refused_by_name_and_value(option, value):
    with pytest.raises(ConfigError, match=rf"{option} .*got {value}"):
        SchedulerConfig(**{**GOOD, option: value})


def test_watermark_and_longest_sequence():
    config = SchedulerConfig(**GOOD, watermark=0.02)
    assert config.watermark_blocks == 2
    assert config.max_sequence_len == 1024
    assert SchedulerConfig(**{**GOOD, "num_blocks": 10}).max_sequence_len == 160


@pytest.mark.parametrize(
    ("option", "value"),
    [("kv_memory_share", 0.0), ("kv_memory_share", math.inf), ("threads", 0), ("num_blocks", 0)],
)
def test_worker_configuration_is_checked(option, value):
    with pytest.raises(ConfigError, match=option):
        WorkerConfig(model="m", **{option: value})


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_blocks_for_is_the_least_that_holds(tokens, block_size):
    blocks = blocks_for(tokens, block_size)
    assert blocks * block_size >= tokens > (blocks - 1) * block_size or tokens == blocks == 0


def test_every_pair_of_state_and_event_is_in_the_table_or_illegal():
    for state, event in itertools.product(State, Event):
        if (state, event) in TRANSITIONS:
            assert advance(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalTransition, match=f"{state.value} sequence cannot"):
                advance(state, event)
    assert not any(source is State.FINISHED for source, _ in TRANSITIONS)
    assert all(state.value in mermaid() for state in State)


def test_pool_hands_out_each_block_once_and_refuses_double_release():
    pool = BlockPool(5)
    taken = pool.allocate(5)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert (pool.free, pool.held) == (0, 5)
    with pytest.raises(InvariantViolation, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)
    pool.release(taken[:2])
    assert pool.free == 2
    with pytest.raises(InvariantViolation, match="not held"):
        pool.release(taken[:1])
    with pytest.raises(InvariantViolation, match="not held"):
        pool.release([0])


def _sequence(number: int, tokens: int = 3) -> Sequence:
    return Sequence(number, EngineRequest((1,) * tokens, SamplingParams(max_tokens=5)), 0.0)


def test_queue_returns_the_preempted_first_by_arrival():
    queue = FcfsQueue()
    sequences = [_sequence(n, tokens=n) for n in range(1, 7)]
    for sequence in sequences[3:]:
        queue.push(sequence)
    for sequence in (sequences[2], sequences[0], sequences[1]):
        queue.push_returning(sequence)
    assert [s.seq_id for s in queue] == [1, 2, 3, 4, 5, 6]
    assert queue.tokens == 21
    queue.remove(sequences[1])
    queue.remove(sequences[4])
    assert queue.tokens == 14
    drained = []
    while (head := queue.peek()) is not None:
        queue.take(head)
        drained.append(head.seq_id)
    assert drained == [1, 3, 4, 6]
    assert (len(queue), queue.tokens) == (0, 0)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e-8, 2.0**31])
def test_no_odd_number_gets_into_sampling(field, value):
    with pytest.raises(InvalidRequest, match=rf"sampling\.{field}: must be .*, got"):
        SamplingParams(max_tokens=5, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1 << 31),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(65))),
    ],
)
def test_integers_out_of_range_are_named(field, value):
    with pytest.raises(InvalidRequest, match=rf"sampling\.{field}"):
        SamplingParams(**{"max_tokens": 5, field: value})


def test_all_violations_are_reported_at_once():
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(max_tokens=0, temperature=-1.0, top_p=2.0)
    assert len(refusal.value.violations) == 3


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 31))
def test_uniform_is_pure_and_in_range(seed, index):
    value = counter_uniform(seed, index)
    assert 0.0 <= value < 1.0
    assert value == counter_uniform(seed, index)


def test_uniform_is_uniform_over_indexes_and_over_seeds():
    """Chi-square over 32 bins; the 0.999 quantile of 31 degrees of freedom is 61.1."""
    for draws in (
        [counter_uniform(42, i) for i in range(32_000)],
        [counter_uniform(s, 0) for s in range(32_000)],
        [counter_uniform(s, s) for s in range(32_000)],
    ):
        bins = Counter(int(u * 32) for u in draws)
        assert sum((bins[b] - 1000) ** 2 / 1000 for b in range(32)) < 61.1


def test_uniform_keeps_its_values():
    """A change here would change every seeded output in the world."""
    assert counter_uniform(0, 0) == pytest.approx(GOLDEN[0], abs=0)
    assert counter_uniform(1, 0) == pytest.approx(GOLDEN[1], abs=0)
    assert counter_uniform((1 << 64) - 1, 12345) == pytest.approx(GOLDEN[2], abs=0)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, MAX_CHOICES - 1))
def test_the_seed_of_a_choice_tells_that_of_its_request(seed, choice):
    own = choice_seed(seed, choice)
    assert 0 <= own < 1 << 64
    assert choice_seed(own, choice) == seed
    assert choice_seed(seed, 0) == seed


def test_choices_of_neighbouring_seeds_do_not_meet():
    seeds = {choice_seed(s, c) for s in range(2000) for c in range(MAX_CHOICES)}
    assert len(seeds) == 2000 * MAX_CHOICES
    draws = [counter_uniform(choice_seed(7, c), i) for c in range(16) for i in range(2000)]
    assert len(set(draws)) == len(draws)
    bins = Counter(int(u * 32) for u in draws)
    assert sum((bins[b] - 1000) ** 2 / 1000 for b in range(32)) < 61.1


def test_seeds_of_choices_keep_their_values():
    """As with uniform: seeded outputs depend on them, and so does a resumed call's seed."""
    assert [choice_seed(1, c) for c in (0, 1, 2, 15)] == CHOICE_GOLDEN


@pytest.mark.parametrize("n", [-1, 0, MAX_CHOICES + 1, 1 << 62])
def test_a_number_of_choices_out_of_range_is_named_with_the_limit(n):
    violation = choices_violation(n)
    assert violation.field == "sampling.n"
    assert violation.description == f"must be between 1 and 16, got {n}"
    assert choices_violation(1) is choices_violation(MAX_CHOICES) is None


GOLDEN = (0.6524484863740322, 0.36818951565166946, 0.1450707396536649)
CHOICE_GOLDEN = [1, 10451216379200822464, 10905525725756348111, 9753551079159975940]
