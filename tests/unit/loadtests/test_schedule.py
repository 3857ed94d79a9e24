"""Arrivals, scenarios and prompts: what is sent, and that every worker derives the same."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from itertools import pairwise

import pytest

from cluster.core.errors import ConfigError
from cluster.sim.traces import find_trace, read_trace
from loadtests.arrivals import Closed, Renewal, Replay, Steps, parse_arrivals
from loadtests.prompts import HASH_BLOCK, PromptMaker, corpus_text
from loadtests.scenario import PlannedRequest, Scenario, shard_of


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("poisson:2", Renewal(2.0)),
        ("gamma:2:3", Renewal(2.0, 3.0)),
        ("constant:2", Renewal(2.0, 0.0)),
        ("steps:1x10,4x5", Steps(((1.0, 10.0), (4.0, 5.0)))),
        ("trace:azure-conv", Replay("azure-conv")),
        ("closed:8", Closed(8)),
    ],
)
def test_arrivals_are_named_by_a_short_text(text, parsed):
    assert parse_arrivals(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "poisson", "poisson:0", "poisson:nan", "gamma:2", "steps:1", "closed:0", "trace:"]
)
def test_what_is_no_arrival_process_is_refused_with_the_choices(text):
    with pytest.raises(ConfigError, match="poisson:RATE"):
        parse_arrivals(text)


@pytest.mark.parametrize(("text", "cv"), [("poisson:5", 1), ("gamma:5:2", 2), ("constant:5", 0)])
def test_gaps_have_the_asked_mean_and_variation(text, cv):
    times = [r.at_s for r in Scenario(arrivals=text, requests=8000).schedule()]
    gaps = [b - a for a, b in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert math.isclose(mean, 0.2, rel_tol=0.08)
    assert math.isclose(statistics.pstdev(gaps) / mean, cv, rel_tol=0.1, abs_tol=1e-6)


def test_steps_change_the_rate_at_their_time():
    scenario = Scenario(arrivals="steps:2x100,10x100", requests=10_000)
    times = [r.at_s for r in scenario.schedule()]
    early = sum(t < 100 for t in times)
    assert math.isclose(early, 200, rel_tol=0.25)
    assert math.isclose(len(times) - early, 1000, rel_tol=0.12)
    assert max(times) <= 200


def test_a_trace_is_replayed_with_time_and_length_scale_and_caps():
    trace = read_trace(find_trace("azure-conv")).requests[:40]
    scenario = Scenario(
        arrivals="trace:azure-conv", requests=40, rate_scale=2, length_scale=0.5, max_input=300
    )
    for row, recorded in zip(scenario.schedule(), trace, strict=True):
        assert row.at_s == pytest.approx(recorded.arrival_s / 2)
        assert row.input_length == min(300, max(1, math.floor(recorded.input_length / 2 + 0.5)))


def test_shards_hold_every_request_once_and_keep_sessions_together():
    schedule = Scenario(requests=50, turns=3, tenants=4).schedule()
    assert [row.number for row in schedule] == list(range(150))
    shards = [shard_of(schedule, k, 3) for k in range(3)]
    assert sorted(row.number for shard in shards for row in shard) == list(range(150))
    homes = [{row.session for row in shard} for shard in shards]
    assert not homes[0] & homes[1]
    assert not homes[1] & homes[2]
    assert not homes[0] & homes[2]
    with pytest.raises(ConfigError, match="shard"):
        shard_of(schedule, 3, 3)


def test_long_prompts_come_in_among_the_others():
    schedule = Scenario(arrivals="constant:2", requests=40, long_every_s=5, long_prompt=900)
    long = [row for row in schedule.schedule() if row.kind == "long"]
    assert [row.at_s for row in long] == [5, 10, 15, 20]
    assert {row.input_length for row in long} == {900}


def test_tenants_are_skewed_and_do_not_move_the_lengths():
    many = Scenario(requests=4000, tenants=4, tenant_skew=1).schedule()
    shares = Counter(row.tenant for row in many)
    assert shares[0] / 4000 == pytest.approx(0.48, abs=0.04)
    assert shares[0] > shares[1] > shares[2] > shares[3]
    alone = Scenario(requests=4000).schedule()
    assert [r.input_length for r in alone] == [r.input_length for r in many]


@pytest.mark.parametrize(
    "change",
    [{"requests": 0}, {"turns": 0}, {"warmup_s": math.nan}, {"arrivals": "closed:2", "turns": 2}],
)
def test_a_scenario_that_makes_no_load_is_refused(change):
    with pytest.raises(ConfigError):
        Scenario(**change)


def test_a_scenario_travels_as_json_and_refuses_what_it_does_not_know():
    scenario = Scenario(arrivals="gamma:3:2", turns=2)
    assert Scenario.from_json(scenario.as_json()) == scenario
    with pytest.raises(ConfigError, match="colour"):
        Scenario.from_json({**scenario.as_json(), "colour": 1})


# -- prompts -------------------------------------------------------------------------------------

POOL = list(range(2000))


def test_prompts_have_the_asked_length_and_are_the_same_everywhere():
    for row in Scenario(requests=30).schedule():
        prompt = PromptMaker(POOL, 0).make(row)
        assert len(prompt) == row.input_length
        assert PromptMaker(POOL, 0).make(row) == prompt
        assert row.input_length < 8 or PromptMaker(POOL, 1).make(row) != prompt


def test_equal_hash_ids_share_a_prefix_and_nothing_more():
    make = PromptMaker(POOL, 0).make
    a = make(PlannedRequest(1, 0, "request", 1300, 1, hash_ids=(7, 8, 9)))
    b = make(PlannedRequest(2, 0, "request", 1500, 1, hash_ids=(7, 8, 10)))
    assert a[: 2 * HASH_BLOCK] == b[: 2 * HASH_BLOCK]
    assert a[2 * HASH_BLOCK : 2 * HASH_BLOCK + 64] != b[2 * HASH_BLOCK : 2 * HASH_BLOCK + 64]
    assert (len(a), len(b)) == (1300, 1500)
    tail = make(PlannedRequest(3, 0, "request", 700, 1, hash_ids=(7,)))
    assert len(tail) == 700
    assert tail[:HASH_BLOCK] == a[:HASH_BLOCK]


def test_the_mooncake_trace_really_shares_prefixes():
    scenario = Scenario(arrivals="trace:mooncake", requests=200, max_input=2048)
    make = PromptMaker(POOL, 0).make
    heads = Counter(tuple(make(row)[:256]) for row in scenario.schedule())
    assert heads.most_common(1)[0][1] > 1


def test_the_corpus_is_text():
    words = corpus_text().split()
    assert len(words) > 1000
    assert len(set(words)) > 500
