"""Cost models against figures worked out elsewhere and against identities."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.core.errors import ConfigError
from cluster.core.plan import Row, StepPlan
from cluster.sim.capacity import decode_size, kv_tokens, static_efficiency, users_within
from cluster.sim.costs.base import StepSize, size_of
from cluster.sim.costs.hardware import PowerLimit
from cluster.sim.costs.presets import HARDWARE, MODELS, find_hardware, find_model
from cluster.sim.costs.roofline import RooflineCost, StepWork, capped_seconds

H100 = HARDWARE["h100"]
LLAMA = MODELS["llama-3-8b"]
COST = RooflineCost(H100, StepWork.of(LLAMA))

PEAK_COST = RooflineCost(
    replace(H100, power=None, flops_share=1.0, bandwidth_share=1.0, overhead_s=0.0),
    replace(StepWork.of(LLAMA), flops_per_token=2 * 8.03e9, weight_bytes=16.06e9),
)
"""The article's figures at peak: 8.03e9 parameters, all of them counted."""


def plan_of(*rows: tuple[int, int]) -> StepPlan:
    """(start, count) pairs, decodes first."""
    plan = StepPlan(1, [Row(i, start, count, True, []) for i, (start, count) in enumerate(rows)])
    plan.num_tokens = sum(count for _, count in rows)
    plan.num_decodes = sum(1 for _, count in rows if count == 1)
    return plan


def milliseconds(*rows: tuple[int, int]) -> float:
    return 1e3 * COST.seconds(plan_of(*rows))


DECODES = [(1100, 1)] * 16


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 1024)], 29.261258959713206),
        ([(1100, 1)], 6.154341540298508),
        (DECODES, 6.962094137313433),
        ([*DECODES, (512, 512)], 15.590009188594257),
    ],
)
def test_single_steps(rows, expected):
    assert milliseconds(*rows) == pytest.approx(expected, rel=1e-9)


def test_constants_of_the_article():
    assert LLAMA.matmul_params == 7_504_658_432
    assert LLAMA.params == 8_029_995_008
    assert LLAMA.kv_bytes_per_token == 131_072


def test_a_mixed_step_without_decodes_is_a_prefill_and_without_a_chunk_a_decode():
    assert size_of(plan_of((0, 1024))) == StepSize(1024, 1024, 1024 * 1025)
    assert size_of(plan_of(*DECODES)) == decode_size(16, 1101)


@pytest.mark.parametrize("cuts", [[512], [1, 2, 3], [100, 612, 1000], list(range(16, 1024, 16))])
def test_attention_telescopes_over_the_chunks_of_a_prompt(cuts):
    edges = [0, *cuts, 1024]
    chunks = list(pairwise(edges))
    pairs = sum(size_of(plan_of((a, e - a))).pairs for a, e in chunks)
    assert pairs == size_of(plan_of((0, 1024))).pairs


def test_a_chunk_of_one_token_and_a_padding_row_cost_a_decode():
    assert size_of(plan_of((700, 1))) == decode_size(1, 701)


# -- power ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_s", [0.002, 0.009, 0.01, 0.012, 0.1])
def test_the_capped_clock_just_meets_the_power(compute_s):
    memory_s, memory_j, watts = 0.01, 1.0, 600.0
    compute_j = compute_s * 1500.0
    limit = PowerLimit(watts)
    got = capped_seconds(compute_s, memory_s, compute_j, memory_j, limit)
    # The same by bisection over the clock scale, as the definition has it.
    low, high = limit.min_scale, 1.0
    for _ in range(200):
        scale = (low + high) / 2
        power = (compute_j * scale**2 + memory_j) / max(compute_s / scale, memory_s)
        low, high = (scale, high) if power <= watts else (low, scale)
    energy = compute_j * low**2 + memory_j
    expected = max(compute_s / low, memory_s, energy / watts)
    assert got == pytest.approx(expected, rel=1e-9)


def test_below_the_lowest_clock_the_step_is_stretched():
    got = capped_seconds(0.001, 0.001, 10.0, 5.0, PowerLimit(600.0))
    assert got == pytest.approx((10.0 * 0.16 + 5.0) / 600.0)


# -- the long-prompt stall, at peak figures -----------------------------------------------------


def test_decode_step_of_64_users():
    step_s = PEAK_COST.of_size(decode_size(64, 4096))
    assert 1e3 * step_s == pytest.approx(15.05, abs=0.006)
    assert 1 / step_s == pytest.approx(66.4, abs=0.05)
    work = PEAK_COST.work
    moved = work.weight_bytes + 64 * 4096 * work.bytes_per_position
    assert moved / 1e9 == pytest.approx(50.42, abs=0.005)
    assert 64 * work.flops_per_token / 989e12 == pytest.approx(1.04e-3, abs=5e-6)


def test_prefill_of_a_long_prompt():
    work, tokens = PEAK_COST.work, 32_768
    linear, attention = work.flops_per_token * tokens, work.flops_per_pair * tokens * (tokens + 1)
    assert linear / 1e12 == pytest.approx(526.3, abs=0.06)
    assert attention / 1e12 == pytest.approx(281.5, abs=0.06)
    step_s = PEAK_COST.seconds(plan_of((0, tokens)))
    assert step_s == pytest.approx(0.8167, abs=1e-4)
    gap_s = step_s + PEAK_COST.of_size(decode_size(64, 4096))
    assert 1e3 * gap_s == pytest.approx(831.8, abs=0.1)


def test_tokens_that_ride_along_for_nothing():
    step_s = PEAK_COST.of_size(decode_size(64, 4096))
    assert step_s * 989e12 / PEAK_COST.work.flops_per_token == pytest.approx(926.8, abs=0.5)


# -- memory decides who gets in -----------------------------------------------------------------


def test_users_that_fit_the_memory():
    tokens = kv_tokens(80e9, 16.06e9, LLAMA.kv_bytes_per_token)
    assert tokens == 487_823
    assert tokens // 4096 == 119
    assert tokens // 1500 == 325
    idle = 1 - 1500 / 4096
    assert idle == pytest.approx(0.634, abs=5e-4)


@pytest.mark.parametrize(("target_s", "users", "tok_s"), [(0.020, 189, 9479), (0.010, 64, 6450)])
def test_users_within_a_gap(target_s, users, tok_s):
    assert users_within(PEAK_COST, target_s, 2048) == users
    assert users / PEAK_COST.of_size(decode_size(users, 2048)) == pytest.approx(tok_s, rel=1e-3)


def test_memory_limits_before_the_gap_does():
    users = kv_tokens(80e9, 16.06e9, LLAMA.kv_bytes_per_token) // 2048
    step_s = PEAK_COST.of_size(decode_size(users, 2048))
    assert users == 238
    assert users / step_s == pytest.approx(9973, rel=1e-3)
    assert step_s / 0.010 == pytest.approx(2.40, abs=0.02)


def test_static_efficiency():
    assert static_efficiency([20, 5, 90, 95]) == pytest.approx(0.5526, abs=5e-5)


# -- presets ------------------------------------------------------------------------------------


def test_tensor_parallel_divides_the_work_and_adds_all_reduces():
    model = MODELS["llama-3-70b"]
    one, eight = StepWork.of(model), StepWork.of(model, 8)
    assert eight.flops_per_token == one.flops_per_token / 8
    assert eight.bytes_per_position == one.bytes_per_position / 8
    assert one.all_reduces == 0
    assert eight.all_reduces == 160
    # 2 all-reduces x 80 layers x 2 (t - 1) / t x 8192 values x 2 bytes
    assert eight.link_bytes_per_token == pytest.approx(160 * 2 * 7 / 8 * 16384)
    size = StepSize(2048, 2048, 2048 * 2049)
    ratio = RooflineCost(H100, one).of_size(size) / RooflineCost(H100, eight).of_size(size)
    assert 4 < ratio < 8


def test_kv_heads_are_not_split_beyond_one_each():
    model = MODELS["llama-3-8b"]
    assert StepWork.of(model, 16).bytes_per_position == StepWork.of(model, 8).bytes_per_position


@pytest.mark.parametrize("ranks", [0, -1, 3, 64])
def test_tensor_parallel_that_does_not_divide_the_heads(ranks):
    with pytest.raises(ConfigError, match=f"got {ranks}"):
        StepWork.of(LLAMA, ranks)


def test_names():
    assert find_model("8B") is LLAMA
    assert find_hardware("H100") is H100
    with pytest.raises(ConfigError, match="there are a100, h100"):
        find_hardware("v100")
    with pytest.raises(ConfigError, match="unknown model 'gpt'"):
        find_model("gpt")


def test_this_cpu_is_measured():
    cpu = find_hardware("cpu")
    assert 1e8 < cpu.flops < 1e15
    assert 1e8 < cpu.bandwidth < 1e13
    assert cpu.memory > 1e8
