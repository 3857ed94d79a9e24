"""The real scheduler over the real model: the same tokens whatever the scheduling does.

The reference is transformers on the same weights; fp32, greedy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config import SchedulerConfig, WorkerConfig
from cluster.core.invariants import check_idle, check_scheduler
from cluster.core.policies import BATCHING, PolicyChoice, make_scheduler
from cluster.core.preemption import SwapCosts
from cluster.core.request import EngineRequest
from cluster.core.sampling import SamplingParams
from cluster.core.scheduler import Scheduler
from tests.determinism.test_llama_oracle import oracle_tokens, prompts
from tests.determinism.tiny_models import TinyLlama, write_model
from workers.executor import LocalExecutor

OUTPUT = 40
BLOCK = 4
BIG_POOL = 1600
SMALL_POOL = 48
"""Blocks; the longest request alone needs 43 of them."""
SHARED = [9, 8, 7, 6, 5, 4, 3, 2] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), TinyLlama())


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    """Sixteen prompts; some begin alike, two are the same."""
    plain = prompts(128, 10)
    return [*plain, *(SHARED + p[:9] for p in plain[:4]), plain[5], SHARED + plain[0][:9]]


@pytest.fixture(scope="module")
def truth(folder: Path, asked: list[list[int]]) -> list[list[int]]:
    return oracle_tokens(folder, asked, OUTPUT)


def serve(
    folder: Path,
    asked: list[list[int]],
    choice: PolicyChoice,
    *,
    budget: int = 64,
    max_num_seqs: int = 16,
    num_blocks: int = BIG_POOL,
) -> tuple[list[list[int]], Scheduler]:
    """All requests at once, to the end, through a fresh scheduler and executor."""
    worker = WorkerConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
    )
    executor = LocalExecutor(worker, host_blocks=choice.host_blocks)
    config = SchedulerConfig(budget, max_num_seqs, BLOCK, num_blocks, executor.info.max_model_len)
    scheduler = make_scheduler(config, choice)
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
    numbers = {
        scheduler.add(EngineRequest(tuple(prompt), sampling), 0.0).seq_id: i
        for i, prompt in enumerate(asked)
    }
    outputs: list[list[int]] = [[] for _ in asked]
    scheduler.close_arrivals()
    while (plan := scheduler.plan(0.0)) is not None:
        for seq_id, index, token, _ in scheduler.commit(executor.submit(plan).wait()).outcomes:
            assert index == len(outputs[numbers[seq_id]])
            outputs[numbers[seq_id]].append(token)
        check_scheduler(scheduler)
    check_idle(scheduler)
    executor.close()
    return outputs, scheduler


@pytest.mark.parametrize("budget", [16, 64, 512, 4096])
@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_budget_and_batch_size_change_nothing(folder, asked, truth, budget, max_num_seqs):
    """R15: the same prompts with budgets from 16 to unlimited."""
    outputs, _ = serve(folder, asked, PolicyChoice(), budget=budget, max_num_seqs=max_num_seqs)
    assert outputs == truth


@pytest.mark.parametrize("batching", BATCHING)
def test_batching_policies_change_nothing(folder, asked, truth, batching):
    outputs, scheduler = serve(folder, asked, PolicyChoice(batching), max_num_seqs=4)
    assert outputs == truth
    if batching in ("static", "dynamic"):
        assert scheduler.counters.padded_tokens >= 0


@pytest.mark.parametrize("prefix_cache", ["off", "on"])
@pytest.mark.parametrize("reservation", ["on-demand", "prompt"])
def test_several_preemptions_change_nothing(folder, asked, truth, prefix_cache, reservation):
    """R16: a pool so small that requests are recomputed, some of them more than once."""
    choice = PolicyChoice(prefix_cache=prefix_cache, reservation=reservation)
    outputs, scheduler = serve(folder, asked, choice, budget=32, num_blocks=SMALL_POOL)
    assert outputs == truth
    assert scheduler.counters.preemptions >= 2
    assert scheduler.counters.recomputed_tokens > 0


def test_swapping_changes_nothing(folder, asked, truth):
    choice = PolicyChoice(
        reservation="prompt",
        preemption="swap",
        host_blocks=64,
        swap_costs=SwapCosts(1.0, 1e9),
    )
    outputs, scheduler = serve(folder, asked, choice, budget=32, num_blocks=SMALL_POOL)
    assert outputs == truth
    assert scheduler.counters.swapped_blocks > 0
    assert scheduler.counters.recomputed_tokens == 0


def test_shared_and_copied_blocks_change_nothing(folder, asked, truth):
    choice = PolicyChoice(prefix_cache="on")
    outputs, scheduler = serve(folder, asked, choice, max_num_seqs=2)
    assert outputs == truth
    assert scheduler.counters.prefix_hit_tokens >= 100
    without = replace(choice, prefix_cache="off")
    assert serve(folder, asked, without, max_num_seqs=2)[0] == truth
