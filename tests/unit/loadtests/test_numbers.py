"""Records, histograms, bounds, validity and verdict: numbers against independent arithmetic."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from cluster.core.errors import ConfigError
from loadtests.bounds import lower_rank, percentile_interval, upper_rank
from loadtests.histograms import Histogram, Histograms
from loadtests.objectives import Objectives, exit_code, load_objectives
from loadtests.records import Record, read_records, write_records
from loadtests.selfcheck import SelfCheck
from loadtests.validity import Limits, validity_checks
from tests.unit.loadtests.support import record, results

# -- records -------------------------------------------------------------------------------------


def test_ttft_counts_from_the_schedule_and_tpot_from_the_first_token():
    late = record(at_s=2.0, sent_s=5.0, first_s=5.5, last_s=6.4, done_s=6.5)
    assert late.ttft_s == pytest.approx(3.5)
    assert late.send_lag_s == pytest.approx(3.0)
    assert late.tpot_s == pytest.approx(0.9 / 9)
    assert record(tokens=1, expected=1, gaps_us=[]).tpot_s is None


@pytest.mark.parametrize(
    "change", [{"faults": 1}, {"expected": 11}, {"error": "X"}, {"first_s": -1}]
)
def test_a_request_that_lost_something_is_not_ok(change):
    assert record().ok
    assert not record(**change).ok


def test_records_survive_the_file(tmp_path):
    path = tmp_path / "requests.jsonl"
    written = [record(3, error="OVERLOADED"), record(4, queue_s=0.25)]
    write_records(path, written)
    assert [r.to_json() for r in read_records(path)] == [r.to_json() for r in written]
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"requests\.jsonl"):
        list(read_records(path))


# -- histograms and bounds -----------------------------------------------------------------------


def test_merged_histograms_equal_one_that_saw_everything():
    draws = random.Random(5)
    values = [draws.lognormvariate(9, 2) for _ in range(20_000)]
    whole, parts = Histogram(), [Histogram() for _ in range(3)]
    for place, value in enumerate(values):
        whole.add(value)
        parts[place % 3].add(value)
    merged = Histogram()
    for part in parts:
        merged.merge(part.encode())
    assert list(merged.recorded()) == list(whole.recorded())
    assert merged.count == 20_000
    values.sort()
    for q in (50, 90, 99, 99.9):
        exact = values[round(q / 100 * 20_000) - 1] / 1e3
        assert merged.percentile_ms(q) == pytest.approx(exact, rel=2e-3)


def test_a_p99_has_a_bound_from_299_samples_on():
    assert upper_rank(298, 0.99) is None
    assert upper_rank(299, 0.99) == 299
    assert upper_rank(0, 0.99) is None


@pytest.mark.parametrize(("count", "share"), [(300, 0.99), (1000, 0.99), (1000, 0.5), (5000, 0.9)])
def test_the_bound_covers_the_true_quantile_as_often_as_it_says(count, share):
    draws = np.random.default_rng(3).random((2000, count))
    draws.sort(axis=1)
    upper, lower = upper_rank(count, share), lower_rank(count, share)
    covered = (draws[:, upper - 1] >= share).mean()
    assert 0.94 <= covered <= 1.0
    if lower is not None:
        assert (draws[:, lower - 1] <= share).mean() >= 0.94


def test_large_samples_use_the_normal_form_of_the_same_bound():
    low, high = percentile_interval(200_000, 0.99)
    deviation = math.sqrt(200_000 * 0.99 * 0.01)
    assert high == pytest.approx(198_000 + 1.96 * deviation, abs=3)
    assert low == pytest.approx(198_000 - 1.96 * deviation, abs=3)


def test_warm_up_and_failures_have_no_latencies():
    histograms = Histograms()
    for item in (record(), record(warmup=True), record(error="X"), record(sent_s=-1.0)):
        histograms.add_record(item)
    assert histograms["TTFT"].count == 1
    assert histograms["ITL"].count == 9
    assert histograms["send lag"].count == 2
    assert histograms["ITL"].percentile_ms(99) == pytest.approx(10, rel=1e-3)
    assert histograms["longest gap"].max_ms == pytest.approx(10, rel=1e-3)


def test_pooled_gaps_show_the_stall_that_tpot_hides():
    stalled = record(gaps_us=[10_000] * 8 + [900_000], last_s=0.05 + 0.98)
    histograms = Histograms()
    histograms.add_record(stalled)
    assert histograms["TPOT"].max_ms < 120
    assert histograms["ITL"].max_ms == pytest.approx(900, rel=1e-3)


# -- validity and verdict ------------------------------------------------------------------------


def _failed(run, **changes) -> set[str]:
    return {check.name for check in validity_checks(run, Limits(), **changes) if not check.passed}


def test_a_clean_run_is_valid():
    assert _failed(results([record(k) for k in range(5)])) == set()


def test_each_way_to_measure_the_client_is_named():
    assert _failed(results([record()], cpu_share=0.85)) == {"client CPU"}
    assert _failed(results([record()], wire_lag_ms=25)) == {"wire lag P99"}
    late = record(sent_s=0.5, first_s=0.6)
    assert _failed(results([late])) == {"send lag P99"}
    assert _failed(results([late]), closed_loop=True) == set()
    assert _failed(results([record(), record(faults=1)])) == {"tokens without gap or repeat"}
    unsent = results([record(), record(sent_s=-1.0, first_s=-1.0)])
    assert _failed(unsent) == {"sent = scheduled"}


def test_a_child_that_was_lost_makes_the_run_invalid():
    run = results([record()])
    run.expect_child(3)
    assert _failed(run) == {
        "sent = scheduled",
        "children heard to the end",
        "every request accounted for",
    }


def test_exit_codes_put_validity_before_the_verdict():
    good, bad = results([record()]), results([record()], cpu_share=0.9)
    met, missed = Objectives(ttft_p99_ms=60), Objectives(ttft_p99_ms=40)
    for run, objectives, code in (
        (good, met, 0),
        (good, missed, 3),
        (bad, met, 4),
        (bad, missed, 4),
    ):
        assert exit_code(validity_checks(run, Limits()), objectives.checks(run)) == code


def test_failed_requests_count_against_the_objectives():
    run = results([record(k) for k in range(9)] + [record(9, error="OVERLOADED")])
    failed = {c.name for c in Objectives(error_percent=5).checks(run) if not c.passed}
    assert failed == {"failed requests"}
    assert run.errors == {"OVERLOADED": 1}


def test_goodput_asks_every_request_for_every_limit():
    limits = Objectives(ttft_p99_ms=60, tpot_p99_ms=12, itl_p99_ms=50)
    assert limits.met_by(record())
    assert not limits.met_by(record(gap_ms=13))
    assert not limits.met_by(record(gaps_us=[1000] * 8 + [60_000]))
    assert not limits.met_by(record(first_s=0.2))
    assert not limits.met_by(record(error="X"))


def test_mlperf_limits_are_there_by_name():
    wanted = {
        "mlperf-llama2-70b": (2000, 200),
        "mlperf-llama2-70b-interactive": (450, 40),
        "mlperf-llama3.1-8b": (2000, 100),
        "mlperf-llama3.1-8b-interactive": (500, 30),
        "mlperf-llama3.1-405b": (6000, 175),
        "mlperf-llama3.1-405b-interactive": (4500, 80),
    }
    for name, (ttft, tpot) in wanted.items():
        row = load_objectives(name)
        assert (row.ttft_p99_ms, row.tpot_p99_ms) == (ttft, tpot)


def test_unknown_objectives_and_keys_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'nix'.*embedded-cpu"):
        load_objectives("nix")
    path = tmp_path / "slo.toml"
    path.write_text("[x]\nttft = 3\n")
    with pytest.raises(ConfigError, match="'ttft'"):
        load_objectives("x", path)
    path.write_text("[x]\nttft_p99_ms = -3\n")
    with pytest.raises(ConfigError, match="-3"):
        load_objectives("x", path)


def test_a_summary_is_json_without_surprises():
    summary = json.loads(json.dumps(results([record(k) for k in range(3)]).summary()))
    assert summary["counts"]["scheduled"] == summary["counts"]["sent"] == 3
    assert summary["counts"]["tokens"] == summary["counts"]["server_tokens"] == 30
    assert summary["latencies_ms"]["TTFT"]["p99_bound"] is None


def test_unknown_fields_of_a_record_are_left_out():
    values = json.loads(record().to_json())
    assert Record.from_json({**values, "later": 1}).to_json() == record().to_json()


def test_the_self_check_finds_a_client_that_reads_other_gaps():
    check = SelfCheck(tokens_per_s=100, output=10, seconds=1)
    assert check.scenario().schedule()[-1].output_length == 10
    for gap_ms, failed in ((10.0, set()), (10.4, {"TPOT P50", "ITL P50"}), (12, {"ITL P99"})):
        run = results([record(k, gap_ms=gap_ms) for k in range(5)])
        for _ in range(45):
            run.histograms["ITL emitted"].add(10_000)
        found = {c.name for c in check.checks(run) if not c.passed}
        assert found >= failed
        assert bool(found) == bool(failed)
