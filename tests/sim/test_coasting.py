"""Stretches of steps taken at once against every step by itself: nothing may differ."""

from __future__ import annotations

import dataclasses
import random

import pytest

from cluster.core.invariants import check_idle, check_scheduler
from cluster.core.policies import PolicyChoice
from cluster.sim.article import POLICIES, article_experiment
from cluster.sim.coast import CoastingScheduler
from cluster.sim.engine import Slowdown
from cluster.sim.experiment import EngineSetup, Experiment, Machine
from cluster.sim.metrics import Meter, Objectives
from cluster.sim.workload import Lengths, SimRequest, Synthetic
from tests.unit.core.support import Driver

COST = Machine.named("h100", "llama-3-8b").cost()


def assert_same(experiment: Experiment) -> None:
    meters = Meter(experiment.objectives, keep=True), Meter(experiment.objectives, keep=True)
    fast = experiment.run(meter=meters[0])
    slow = experiment.run(meter=meters[1], coasting=False)
    # A mean over requests whose engines ended steps at one moment: summed in another order.
    assert fast.queue_mean_ms == pytest.approx(slow.queue_mean_ms, rel=1e-12)
    assert dataclasses.replace(fast, queue_mean_ms=slow.queue_mean_ms) == slow
    for stream, record in meters[1].records.items():
        other = meters[0].records[stream]
        for name in record.__slots__:
            assert getattr(record, name) == getattr(other, name), (stream, name)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_article(policy):
    assert_same(article_experiment(policy))


@pytest.mark.parametrize("seed", range(12))
def test_random_setups(seed):
    """Small pools (preemptions), several engines, bursts, objectives, a machine that slows down."""
    rng = random.Random(seed)
    setup = EngineSetup(
        budget=rng.choice([16, 64, 512, 4096]),
        max_num_seqs=rng.choice([4, 16, 64]),
        kv_tokens=rng.choice([2_000, 6_000, 100_000]),
        block_size=rng.choice([1, 16]),
        watermark=rng.choice([0.0, 0.02]),
        policies=PolicyChoice(batching=rng.choice(["chunked", "continuous", "fused"])),
    )
    workload = Synthetic(
        80, rng.choice([4.0, 40.0]), Lengths(300), Lengths(90), rng.choice([0.0, 1.0, 4.0]), seed
    )
    experiment = Experiment(
        setup,
        COST,
        workload,
        engines=rng.choice([1, 3]),
        objectives=Objectives(1.0, 0.02, 0.012),
        slowdown=rng.choice([None, Slowdown(2.0, 1.5)]),
    )
    assert_same(experiment)


def test_a_small_pool_preempts_in_both():
    setup = EngineSetup(512, 32, kv_tokens=3_000)
    workload = [SimRequest(0.0, 200, 400) for _ in range(8)]
    experiment = Experiment(setup, COST, workload)
    assert experiment.run().preemptions > 0
    assert_same(experiment)


def test_the_scheduler_is_where_the_steps_would_have_led():
    """State for state: books, counters, contexts and turns."""

    def grown(steps: int) -> Driver:
        driver = Driver(num_blocks=200)
        driver.scheduler = CoastingScheduler(driver.config)
        for prompt, output in ((5, 40), (9, 60), (20, 30)):
            driver.add(prompt, output)
        for _ in range(steps):
            driver.step()
        return driver

    ahead, step_by_step = grown(3), grown(3 + 17)
    assert 17 <= ahead.scheduler.quiet_steps(-1) == 27
    ahead.scheduler.coast(17, 1)
    check_scheduler(ahead.scheduler)
    assert dataclasses.asdict(ahead.scheduler.counters) == dataclasses.asdict(
        step_by_step.scheduler.counters
    )
    pairs = zip(ahead.scheduler.running, step_by_step.scheduler.running, strict=True)
    for one, other in pairs:
        assert (one.computed, one.total, one.turn, one.capacity) == (
            other.computed,
            other.total,
            other.turn,
            other.capacity,
        )
    assert ahead.scheduler.kv.free == step_by_step.scheduler.kv.free


def test_no_stretch_while_somebody_waits_or_could_end():
    driver = Driver(max_num_seqs=1)
    driver.scheduler = CoastingScheduler(driver.config)
    driver.add(4, 3)
    assert driver.scheduler.quiet_steps(1) == 0
    driver.step()
    assert driver.scheduler.quiet_steps(1) == 2
    driver.add(4, 3)
    assert driver.scheduler.quiet_steps(1) == 0


def test_the_last_step_of_a_stretch_ends_sequences():
    driver = Driver()
    driver.scheduler = CoastingScheduler(driver.config)
    driver.add(4, 6)
    driver.add(4, 6)
    driver.step()
    ended = driver.scheduler.coast(driver.scheduler.quiet_steps(1), 1)
    assert [s.emitted for s in ended] == [6, 6]
    assert driver.scheduler.plan(9.0) is None
    check_idle(driver.scheduler)


def test_no_stretch_past_the_pool():
    driver = Driver(num_blocks=3, block_size=4, max_model_len=12)
    driver.scheduler = CoastingScheduler(driver.config)
    driver.add(4, 8)
    driver.step()
    assert driver.scheduler.quiet_steps(1) == 7
    driver.scheduler.kv.pool.allocate(1)
    assert driver.scheduler.quiet_steps(1) == 0
