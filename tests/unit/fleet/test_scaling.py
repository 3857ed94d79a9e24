"""How many engines there should be, and what is told about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.actors.scaling import EnginePolicy, published
from cluster.core.errors import ConfigError
from cluster.fleet.registry import DemandBoard, EngineRecord, EngineRegistry
from cluster.fleet.scaling import EngineUse, FleetDemand, ScalingSettings, wanted_engines

POOL = 1000.0
IDLE, BUSY = EngineUse(0.0, 0.0), EngineUse(0.7, 0.1)
NOTHING = FleetDemand()


def settings(**changes: Any) -> ScalingSettings:
    return ScalingSettings(**({"min_engines": 0, "max_engines": 10} | changes))


def wanted(engines: list[EngineUse], demand: FleetDemand = NOTHING, **changes: Any) -> int:
    return wanted_engines(settings(**changes), engines, demand, POOL)


@pytest.mark.parametrize(
    ("engines", "demand", "count"),
    [
        ([], NOTHING, 0),
        ([IDLE, IDLE], NOTHING, 0),
        ([], FleetDemand(queued=1, tokens=10), 1),
        ([EngineUse(0.01, 0.01)], NOTHING, 1),
        ([BUSY], NOTHING, 1),
        ([EngineUse(0.71, 0.0)], NOTHING, 2),
        ([EngineUse(0.1, 0.9)], NOTHING, 2),
        ([BUSY, BUSY, IDLE], NOTHING, 2),
        ([BUSY], FleetDemand(queued=4, tokens=1400), 3),
        ([BUSY] * 9, FleetDemand(queued=99, tokens=99_000), 10),
    ],
)
def test_as_many_as_have_the_target_load_with_all_that_is_there_and_waits(engines, demand, count):
    assert wanted(engines, demand) == count


def test_a_late_first_token_asks_for_more_than_load_alone():
    late = FleetDemand(ttft_s=3.0)
    assert wanted([BUSY, BUSY], late) == 2
    assert wanted([BUSY, BUSY], late, ttft_objective_s=2.0) == 3
    assert wanted([BUSY] * 4, late, ttft_objective_s=0.1) == 8, "twice as many at a time at most"
    assert wanted([BUSY], FleetDemand(ttft_s=1.0), ttft_objective_s=2.0) == 1


def test_nobody_knows_a_pool_yet():
    assert wanted_engines(settings(), [], FleetDemand(queued=3, tokens=50), 0.0) == 2
    assert wanted_engines(settings(), [], NOTHING, 0.0) == 0


uses = st.builds(EngineUse, st.floats(0, 3), st.floats(0, 3))
demands = st.builds(
    FleetDemand, st.integers(0, 100), st.integers(0, 10**6), st.floats(0, 100, allow_nan=False)
)


@given(st.lists(uses, max_size=12), demands, st.integers(0, 3), st.integers(3, 12))
def test_within_the_limits_and_never_none_while_there_is_work(engines, demand, least, most):
    count = wanted(engines, demand, min_engines=least, max_engines=most)
    assert least <= count <= most
    if demand.queued or any(engine.load > 0 for engine in engines):
        assert count >= 1


@given(st.lists(uses, min_size=1, max_size=8), demands)
def test_more_waiting_never_means_fewer_engines(engines, demand):
    more = demand._replace(queued=demand.queued + 1, tokens=demand.tokens + 500)
    assert wanted(engines, more) >= wanted(engines, demand)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_engines": -1}, "min_engines must be between 0 and max_engines (10), got -1"),
        ({"min_engines": 11}, "got 11"),
        ({"min_engines": 0, "max_engines": 0}, "max_engines must be between 1 and 4096, got 0"),
        ({"target_load": 0.0}, "target_load must be in (0, 1], got 0.0"),
        ({"target_load": float("nan")}, "target_load"),
        ({"down_delay_s": float("inf")}, "down_delay_s must be at least 0, got inf"),
        ({"ttft_objective_s": 0.0}, "ttft_objective_s must be above 0, got 0.0"),
    ],
)
def test_impossible_settings_are_refused(changes, says):
    with pytest.raises(ConfigError) as refused:
        settings(**changes)
    assert says in str(refused.value)


# -- what is told ------------------------------------------------------------------------------


def test_demand_of_all_routers_adds_up_and_that_of_a_dead_one_is_forgotten():
    board = DemandBoard(lease_s=5.0)
    board.tell("a", FleetDemand(2, 100, 1.0), 0.0)
    board.tell("b", FleetDemand(1, 50, 3.0), 2.0)
    board.tell("a", FleetDemand(3, 120, 2.0), 2.0)
    assert board.total(4.0) == FleetDemand(4, 170, 3.0)
    board.tell("b", FleetDemand(), 6.0)
    assert board.total(8.0) == FleetDemand()


def test_the_model_is_known_after_the_last_engine_has_gone():
    from tests.wire.wire_support import tiny_model

    registry, model = EngineRegistry(lease_s=5.0), tiny_model()
    assert registry.directory(0.0) == ([], None)
    registry.renew(EngineRecord("a", "host", 1, epoch=1, model=model), 0.0)
    registry.remove("a", 1)
    assert registry.directory(1.0) == ([], model)


# -- Serve's policy ----------------------------------------------------------------------------


@dataclass
class Context:
    """What Serve hands to a policy, as far as ours looks at it."""

    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    total_queued_requests: float = 0.0
    target_num_replicas: int = 1


def told(**by_engine: dict[str, float]) -> dict[str, dict[str, float]]:
    """As Serve turns it round: by metric, then by replica."""
    names = {name for one in by_engine.values() for name in one}
    return {
        name: {engine: one[name] for engine, one in by_engine.items() if name in one}
        for name in names
    }


def policy(**changes: Any) -> EnginePolicy:
    return EnginePolicy(min_engines=0, max_engines=10, **changes)


def test_the_policy_decides_by_what_the_engines_published():
    demand = FleetDemand(queued=5, tokens=1400, ttft_s=0.5)
    one = published(BUSY, 1000, demand)
    two = published(BUSY, 1000, NOTHING)
    count, state = policy()(Context(told(one=one, two=two)))
    assert (count, state) == (4, {})


def test_an_engine_that_loads_is_waited_for_and_a_waiting_request_starts_one():
    assert policy()(Context(target_num_replicas=2))[0] == 2
    assert policy()(Context(target_num_replicas=0))[0] == 0
    assert policy()(Context(target_num_replicas=0, total_queued_requests=1.0))[0] == 1
