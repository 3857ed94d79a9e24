"""The cost model fitted to measured times."""

from __future__ import annotations

import pytest

from cluster.core.errors import ConfigError
from cluster.sim.costs.base import StepSize
from cluster.sim.costs.presets import HARDWARE, MODELS
from cluster.sim.costs.profiled import LAYER_OPERATIONS, SHIPPED_TIMES, ProfiledCost, read_times
from cluster.sim.costs.roofline import RooflineCost, StepWork
from tests.unit.sim.test_costs import plan_of

H100, LLAMA2 = HARDWARE["h100"], MODELS["llama-2-7b"]


def test_measured_counts_come_back_and_others_lie_between():
    times = read_times(SHIPPED_TIMES, 1)
    place = times.tokens.index(1024)
    measured = times.at(1024, 32)
    assert measured == times.layer_s[place] * 32 + times.step_s[place]
    low, high = times.at(1000, 32), times.at(1008, 32)
    assert min(low, high) <= times.at(1004, 32) <= max(low, high)
    assert times.at(8192, 32) == pytest.approx(2 * times.at(4096, 32))
    assert times.at(0, 32) == times.at(1, 32)


def test_it_agrees_with_the_roofline_within_its_error():
    """Two independent ways to the same machine: within a third from decode to a full prefill."""
    profiled = ProfiledCost(read_times(SHIPPED_TIMES, 1), H100, LLAMA2)
    roofline = RooflineCost(H100, StepWork.of(LLAMA2))
    for plan in (plan_of(*[(500, 1)] * 16), plan_of((0, 1024)), plan_of((0, 4096))):
        assert profiled.seconds(plan) == pytest.approx(roofline.seconds(plan), rel=0.34)


def test_tensor_parallel_is_faster_but_not_in_proportion():
    size = StepSize(2048, 2048, 2048 * 2049)
    seconds = [
        ProfiledCost(read_times(SHIPPED_TIMES, t), H100, LLAMA2, t).of_size(size, 1)
        for t in (1, 2, 4, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[3] < 8


def test_decodes_of_a_stretch_cost_what_their_plan_does():
    cost = ProfiledCost(read_times(SHIPPED_TIMES, 1), H100, LLAMA2)
    assert cost.decode_seconds(3, 303) == cost.seconds(plan_of((100, 1), (100, 1), (100, 1)))


def test_bad_tables(tmp_path):
    with pytest.raises(ConfigError, match="no times for tensor parallel 3: 1, 2, 4, 8"):
        read_times(SHIPPED_TIMES, 3)
    columns = [f"time_stats.{name}.median" for name in (*LAYER_OPERATIONS, "emb")]
    header = ",".join(["num_tensor_parallel_workers", "num_tokens", *columns])
    path = tmp_path / "times.csv"
    path.write_text(f"{header}\n1,16,{','.join(['0.1'] * 9)},fast\n")
    with pytest.raises(ConfigError, match=r"line 2, column 'time_stats\.emb\.median'"):
        read_times(path, 1)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="column 'num_tensor_parallel_workers'"):
        read_times(path, 1)
