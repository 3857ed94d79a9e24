"""The experiments' own arithmetic: bisection, rows, variants, reports."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from cluster.bench import experiments, quick
from cluster.commands import bench
from cluster.config.flags import add_config_flags, flags_of
from cluster.config.load import load_settings
from cluster.config.mapping import policy_choice
from cluster.core.config import SchedulerConfig
from cluster.core.errors import ConfigError
from cluster.core.policies import make_scheduler
from loadtests.arrivals import parse_arrivals
from loadtests.job import Job
from loadtests.outcome import judge
from loadtests.report import write_outcome
from loadtests.scenario import Scenario
from loadtests.targets.base import TargetSpec
from tests.unit.loadtests.support import record, results


def _server_that_holds(rate: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs meet the objectives up to that rate."""
    asked: list[float] = []

    def run_load(job: Job):
        offered = parse_arrivals(job.scenario.arrivals).rate
        asked.append(offered)
        late = 0.05 if offered <= rate else 60.0
        return results([record(k, first_s=late, last_s=late + 0.09) for k in range(5)])

    monkeypatch.setattr(experiments, "run_load", run_load)
    return asked


def test_bisection_finds_the_highest_rate_that_meets(monkeypatch):
    _server_that_holds(3.3, monkeypatch)
    target, said = TargetSpec(), []
    tried = experiments.highest_rate(target, Scenario(), "embedded-cpu", (1, 9, 6), said.append)
    assert experiments.best_rate(tried) == pytest.approx(3.25)
    assert len(tried) == len(said) == 8


@pytest.mark.parametrize(("holds", "best", "runs"), [(0.5, 0.0, 1), (20, 9.0, 2)])
def test_bisection_ends_early_outside_of_its_bounds(holds, best, runs, monkeypatch):
    asked = _server_that_holds(holds, monkeypatch)
    tried = experiments.highest_rate(
        TargetSpec(), Scenario(), "embedded-cpu", (1, 9, 6), lambda _: None
    )
    assert experiments.best_rate(tried) == best
    assert len(asked) == runs


def test_a_row_counts_streams_without_the_long_prompts():
    streams = [record(k, gap_ms=20.0) for k in range(4)]
    long = record(9, kind="long", gap_ms=400.0, first_s=2.0)
    outcome = judge(Job(), results([*streams, long]), "embedded-cpu")
    row = experiments.row_of("chunked", outcome)
    assert row.itl_p99_ms == pytest.approx(20)
    assert row.longest_gap_ms == pytest.approx(20)
    assert row.tpot_p50_ms == pytest.approx(20)
    assert row.long_ttft_p50_ms == pytest.approx(2000)
    assert len(experiments.cells(row)) == len(experiments.COLUMNS)


def test_the_report_stands_alone_with_every_run_beside_it(tmp_path):
    rows = [
        experiments.row_of(name, judge(Job(), results([record()]), "embedded-cpu"))
        for name in ("continuous", "chunked")
    ]
    for row in rows:
        write_outcome(row.outcome, tmp_path / row.name)
    page = experiments.write_report(tmp_path, "A <title>", rows).read_text()
    assert "A &lt;title&gt;" in page
    assert "continuous" in page
    for name in ("continuous", "chunked"):
        for file in ("summary.json", "requests.jsonl", "report.html"):
            assert (tmp_path / name / file).stat().st_size > 0


def test_head_of_line_has_streams_and_long_prompts():
    rows = experiments.head_of_line(16, 100, 1024, 4.0, 5).schedule()
    assert sum(row.kind == "request" for row in rows) == 16
    long = [row for row in rows if row.kind == "long"]
    assert [(row.at_s, row.input_length) for row in long] == [(4.0 * k, 1024) for k in range(1, 6)]
    assert {row.output_length for row in rows if row.kind == "request"} == {100}


def test_long_prompts_are_as_far_apart_as_the_machine_needs():
    """One after the other even where each stops all streams, and all while the streams run."""
    pace = experiments.Pace(prefill_s=12.0, step_s=0.1)
    first_s, every_s = pace.long_prompts_s(output=240, long_count=5)
    assert (first_s, every_s) == (pytest.approx(4.0), pytest.approx(16.0))
    load = experiments.head_of_line(16, 240, 2048, every_s, 5, first_s)
    long = [row.at_s for row in load.schedule() if row.kind == "long"]
    assert long == pytest.approx([4.0, 20.0, 36.0, 52.0, 68.0])
    # Served at once, each stops streams that still have tokens to give.
    decoded_s = [at - k * pace.prefill_s for k, at in enumerate(long)]
    assert decoded_s == pytest.approx([4.0, 8.0, 12.0, 16.0, 20.0])
    assert decoded_s[-1] < 240 * pace.step_s


def test_the_policies_compared_are_ones_that_serve_takes():
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    assert set(experiments.policy_variants(64, 1088, 200.0)) == set(bench.POLICIES)
    for variant in experiments.policy_variants(64, 1088, 200.0).values():
        args = parser.parse_args(list(variant.options))
        configured = load_settings(None, flags_of(args), {})
        config = SchedulerConfig(
            num_blocks=256,
            block_size=16,
            max_num_seqs=20,
            max_num_batched_tokens=configured["engine.max_num_batched_tokens"] or 256,
            max_model_len=2048,
        )
        make_scheduler(config, policy_choice(configured))


def _bench(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *args])


def test_recompute_at_home_is_compared_with_moving_to_another_engine():
    args = _bench("kv")
    assert args.engines > 1
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    moves = {}
    for variant in bench._kv_variants(args.variant):
        configured = load_settings(None, flags_of(parser.parse_args(list(variant.options))), {})
        moves[variant.name] = configured["router.max_moves"]
    assert moves == {"local": 0, "cluster-wide": 3}


def test_a_wrong_policy_or_variant_is_refused_before_anything_is_served():
    for args in (_bench("hol", "--policies", "nix"), _bench("kv", "--variant", "nix")):
        with pytest.raises(ConfigError, match="nix"):
            args.run(args)


def test_the_quick_run_asks_for_half_of_what_the_machine_can_do():
    trace = replace(quick.TRACE, requests=100)
    load = quick.scaled(trace, capacity_rps=3.0)
    rows = load.schedule()
    assert len(rows) / rows[-1].at_s == pytest.approx(1.5, rel=0.02)
    assert [r.input_length for r in rows] == [r.input_length for r in trace.schedule()]
    calibration = quick.calibration_load(trace)
    assert calibration.closed_users == quick.CALIBRATION_USERS
