"""What a run is summed up to, by hand."""

from __future__ import annotations

import math

import pytest

from cluster.core.errors import ConfigError
from cluster.core.outcome import FinishReason
from cluster.engine.core import StreamKey, StreamStats, StreamTokens
from cluster.sim.coast import Stretch
from cluster.sim.metrics import EngineTotals, Meter, Objectives, summarise
from cluster.sim.quantities import describe_objectives, parse_objectives, parse_seconds

STATS = StreamStats(queue_s=0.5, preemptions=1, recomputed_tokens=30, stalled_s=0.0)


def token(stream: int, index: int, last: bool = False) -> StreamTokens:
    finish = FinishReason.LENGTH if last else None
    return StreamTokens(StreamKey(0, stream), index, [1], finish, STATS if last else None)


def test_one_request_by_hand():
    meter = Meter(Objectives(ttft_s=1.0, tpot_s=0.2), keep=True)
    meter.arrived(1, 10.0)
    for index, at in enumerate((10.5, 10.6, 11.0)):
        meter.step([token(1, index, last=index == 2)], at)
    summary = summarise(meter, EngineTotals(engines=2, steps=3, computed_tokens=300, busy_s=11.0))
    assert summary.ttft_p50_ms == pytest.approx(500)
    assert summary.tpot_p50_ms == pytest.approx(250)
    assert summary.max_gap_ms == pytest.approx(400)
    assert summary.itl_p50_ms == pytest.approx(250)
    assert summary.tok_s == pytest.approx(3 / 11)
    assert summary.slo_met_percent == 0
    assert summary.goodput_rps == 0
    assert summary.preemptions == 1
    assert summary.recompute_percent == pytest.approx(10)
    assert summary.utilisation_percent == pytest.approx(50)
    assert summary.queue_mean_ms == pytest.approx(500)
    assert meter.records[1].longest_gap_s == pytest.approx(0.4)


def test_a_stretch_counts_as_its_steps_do():
    one, other = Meter(Objectives(itl_s=0.15)), Meter(Objectives(itl_s=0.15))
    for meter in (one, other):
        for stream in (1, 2):
            meter.arrived(stream, 0.0)
        meter.step([token(1, 0)], 1.0)
        meter.step([token(2, 0)], 1.1)
    ends = [1.2, 1.3, 1.5]
    one.stretch(Stretch(ends, [1, 2], []))
    for index, at in enumerate(ends, start=1):
        other.step([token(1, index), token(2, index)], at)
    for meter in (one, other):
        meter.step([token(1, 4, last=True), token(2, 4, last=True)], 1.6)
    totals = EngineTotals(engines=1, steps=6, computed_tokens=10, busy_s=1.0)
    assert summarise(one, totals) == summarise(other, totals)


def test_a_request_holds_the_itl_objective_by_its_own_p99():
    for late, met in ((1, 100.0), (2, 0.0)):
        meter = Meter(Objectives(math.inf, math.inf, itl_s=0.1))
        meter.arrived(1, 0.0)
        now = 1.0
        for index in range(101):
            now += 0.2 if 0 < index <= late else 0.05
            meter.step([token(1, index, last=index == 100)], now)
        assert summarise(meter, EngineTotals(1)).slo_met_percent == met


def test_refused_and_failed_requests_miss_the_objectives():
    meter = Meter()
    for stream in (1, 2, 3):
        meter.arrived(stream, 0.0)
    meter.refused(1)
    meter.failed(2)
    meter.step([token(3, 0, last=True)], 0.5)
    summary = summarise(meter, EngineTotals(1))
    assert (summary.requests, summary.refused, summary.failed) == (1, 1, 1)
    assert summary.slo_met_percent == pytest.approx(100 / 3)
    assert summary.tpot_p99_ms == 0


def test_nothing_happened():
    summary = summarise(Meter(), EngineTotals(1))
    assert summary.tok_s == summary.goodput_rps == summary.slo_met_percent == 0


def test_memory_is_that_of_the_live_requests():
    meter = Meter()
    for stream in range(1000):
        meter.arrived(stream, float(stream))
        meter.step([token(stream, 0, last=True)], stream + 0.5)
    assert not meter.records
    assert not meter._live


@pytest.mark.parametrize(
    ("text", "seconds"), [("25ms", 0.025), ("1s", 1), ("1.5", 1.5), ("500us", 5e-4), ("2min", 120)]
)
def test_durations(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "-1s", "nan", "inf", "1h", "ms", "1e9"])
def test_bad_durations(text):
    with pytest.raises(ConfigError, match="not a time above 0"):
        parse_seconds(text)


def test_objectives():
    assert parse_objectives("ttft=1s, itl=25ms") == Objectives(1.0, math.inf, 0.025)
    assert describe_objectives(parse_objectives("itl=25ms")) == "ITL P99 25 ms"
    for text in ("ttft", "latency=1s", "ttft=1s,,"):
        with pytest.raises(ConfigError, match="--slo takes"):
            parse_objectives(text)
    with pytest.raises(ConfigError, match="objective ttft_s"):
        Objectives(ttft_s=float("nan"))
