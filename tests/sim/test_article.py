"""The articles' numbers, through the scheduler and the engine that serve real traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

import pytest

from cluster.sim.article import COLUMNS, GOLDEN, POLICIES, article_experiment, run_article
from cluster.sim.metrics import Meter, RequestRecord, Summary
from cluster.sim.workload import SimRequest, article_workload

TOLERANCE = 1e-3

CHUNK_SWEEP = {
    64: (871, 446, 1446, 6.7),
    128: (889, 72, 262, 7.1),
    256: (890, 37, 120, 8.4),
    512: (889, 32, 113, 15.6),
    1024: (889, 30, 122, 29.6),
    2048: (888, 29, 141, 51.8),
    4096: (888, 30, 164, 47.4),
}
"""Budget -> tok/s, TTFT p50, p99, ITL p99 in ms, as printed (rounded) in the article."""


@lru_cache
def summary(policy: str, seed: int = 11, budget: int = 512) -> Summary:
    return article_experiment(policy, seed=seed, budget=budget).run()


def test_the_workload():
    requests = list(article_workload())
    assert requests[:3] == [
        SimRequest(0.11943233652954838, 540, 154),
        SimRequest(0.2481387785146057, 258, 65),
        SimRequest(0.35714013579232096, 661, 89),
    ]
    assert [tuple(r[:3]) for r in requests[3:5]] == [
        (0.38636064260790814, 742, 64),
        (0.5319427239954989, 349, 66),
    ]
    assert len(requests) == 160
    assert sum(r.input_length for r in requests) == 167_496
    assert sum(r.output_length for r in requests) == 20_589
    assert requests[-1].arrival_s == pytest.approx(21.87919931247978, rel=1e-12)


@pytest.mark.parametrize("policy", [p for p in GOLDEN if p != "orca"])
@pytest.mark.parametrize("column", COLUMNS)
def test_table(policy, column):
    expected = GOLDEN[policy][column]
    assert getattr(summary(policy), column) == pytest.approx(expected, rel=TOLERANCE)


def test_orca_row():
    """Its cells are rounded in the article to three or four digits."""
    row = summary("orca")
    assert row.tok_s == pytest.approx(888.4, rel=TOLERANCE)
    assert row.ttft_p99_ms == pytest.approx(184.9, rel=TOLERANCE)
    assert row.itl_p99_ms == pytest.approx(47.4, rel=TOLERANCE)
    assert row.max_gap_ms == pytest.approx(161, abs=0.5)
    assert row.tpot_p99_ms == pytest.approx(11.3, abs=0.05)


@pytest.mark.parametrize("budget", CHUNK_SWEEP)
def test_chunk_sweep(budget):
    tok_s, ttft_p50, ttft_p99, itl_p99 = CHUNK_SWEEP[budget]
    row = summary("chunked", budget=budget)
    assert row.tok_s == pytest.approx(tok_s, abs=0.51)
    assert row.ttft_p50_ms == pytest.approx(ttft_p50, abs=0.51)
    assert row.ttft_p99_ms == pytest.approx(ttft_p99, abs=0.51)
    assert row.itl_p99_ms == pytest.approx(itl_p99, abs=0.051)


def test_tpot_alone_hides_the_stalls():
    continuous, chunked = summary("continuous"), summary("chunked")
    assert continuous.tpot_p99_ms / chunked.tpot_p99_ms < 1.4
    assert continuous.itl_p99_ms / chunked.itl_p99_ms > 3.5
    assert continuous.max_gap_ms / chunked.max_gap_ms > 15


@pytest.mark.parametrize("seed", range(1, 21))
def test_orderings(seed):
    """Held over 200 seeds. That chunked has the lower TTFT p99 holds in 43% of them: not a law."""
    static, continuous = summary("static", seed), summary("continuous", seed)
    chunked = summary("chunked", seed)
    assert continuous.tok_s > static.tok_s
    assert continuous.ttft_p99_ms < static.ttft_p99_ms
    assert chunked.itl_p99_ms < continuous.itl_p99_ms


def _records(policy: str, requests: list[SimRequest]) -> dict[int, RequestRecord]:
    meter = Meter(keep=True)
    replace(article_experiment(policy), workload=requests).run(meter=meter)
    return meter.records


def test_identical_requests_at_once_make_static_and_continuous_the_same():
    requests = [SimRequest(0.0, 700, 40)] * 16
    static, continuous = _records("static", requests), _records("continuous", requests)
    assert static.keys() == continuous.keys() == set(range(1, 17))
    for stream, record in static.items():
        other = continuous[stream]
        assert record.first_s == other.first_s
        assert record.last_s == other.last_s
        assert record.tokens == other.tokens == 40


def test_static_starts_what_is_left_when_no_more_arrivals_come():
    requests = [SimRequest(0.1 * i, 100, 10) for i in range(20)]
    records = _records("static", requests)
    assert len(records) == 20
    assert records[17].first_s > records[16].last_s


def test_dynamic_starts_a_part_of_a_batch_after_its_delay():
    records = _records("dynamic", [SimRequest(0.0, 100, 3), SimRequest(5.0, 100, 3)])
    assert 0.05 <= records[1].first_s < 0.08
    # Nobody comes after the second one, so it need not wait.
    assert 5.0 < records[2].first_s < 5.03


def test_the_article_command_prints_every_cell():
    table = run_article().as_json()
    assert set(table["policies"]) == set(POLICIES)
    assert all(tuple(row) == COLUMNS for row in table["policies"].values())
    assert json.loads(json.dumps(table)) == table
