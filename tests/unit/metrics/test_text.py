"""What is served is what Prometheus' own library reads, and no more than was promised."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.core.load import EngineLoad
from cluster.core.outcome import FinishReason, LossCause, Refusal
from cluster.core.scheduler import Counters
from cluster.metrics import engine, router
from cluster.metrics.engine import EngineMetrics
from cluster.metrics.facts import EngineFacts, RouterCounters, RouterFacts
from cluster.metrics.family import Family, Kind, Label, Lines
from cluster.metrics.router import RouterMetrics
from tests.unit.metrics.scrape import Samples, samples

LOAD = EngineLoad(9, 30, 64, 5, 2, 120, 50.0, 400, 3, 77)
KNOWN = {"router_id": "r0", "engine_id": "e0", "model": "tiny", "version": "1"}


def engine_text(observations: int = 3) -> str:
    counters = Counters(
        steps=9, computed_tokens=500, preemptions=3, rank_preemptions=1, prefix_hit_tokens=64
    )
    facts = EngineFacts(counters, LOAD, 10, 32, 64, 0.02, 16, 2, True, 1.5)
    metrics = EngineMetrics(lambda: facts, KNOWN)
    for _ in range(observations):
        metrics.stepped(0.0125)
    return metrics.text()


def router_metrics() -> RouterMetrics:
    counters = RouterCounters()
    counters.losses[LossCause.SILENT] += 1
    counters.replays[LossCause.SILENT] += 4
    return RouterMetrics(lambda: RouterFacts(6, 3, 450, 7, 5, 1, counters), KNOWN)


def test_an_engine_tells_what_it_reads():
    found = samples(engine_text())
    assert found["headway_engine_info", "e0", "tiny", "1"] == 1
    assert found["headway_engine_step_seconds_count",] == 3
    assert found["headway_engine_step_seconds_sum",] == pytest.approx(0.0375)
    assert found["headway_engine_step_seconds_bucket", "0.012"] == 0
    assert found["headway_engine_step_seconds_bucket", "0.013"] == 3
    assert found["headway_engine_preemptions_total", "blocks"] == 2
    assert found["headway_engine_preemptions_total", "priority"] == 1
    assert found["headway_engine_prefix_hit_tokens_total",] == 64
    assert found["headway_engine_kv_blocks", "held"] == 34
    assert found["headway_engine_kv_blocks", "cached"] == 10
    assert found["headway_engine_kv_blocks", "empty"] == 20
    assert found["headway_engine_kv_use_ratio",] == pytest.approx(34 / 64)
    assert found["headway_engine_budget_tokens",] == 32
    assert found["headway_engine_running",] == 5
    assert found["headway_engine_draining",] == 1
    assert found["process_resident_memory_bytes",] > 1 << 20


def test_a_router_tells_what_its_streams_saw():
    metrics = router_metrics()
    stream = metrics.stream(arrived_s=100.0, prompt_tokens=12)
    for count, at in ((1, 100.0305), (1, 100.0355), (2, 100.0495), (1, 100.0500)):
        stream.tokens(count, at)
    stream.finished(FinishReason.LENGTH, 0.0042)
    stream.over(100.051)
    again = metrics.resumed(arrived_s=200.0)
    again.tokens(3, 200.5)
    again.over(200.6)
    metrics.refused(Refusal.OBJECTIVE)
    metrics.began()
    metrics.began()
    metrics.ended("Generate", "RESOURCE_EXHAUSTED")
    metrics.ended("Complete", "DATA_LOSS")
    found = samples(metrics.text())
    assert found["headway_router_ttft_seconds_count",] == 1
    assert found["headway_router_ttft_seconds_bucket", "0.031"] == 1
    # 5, 14, 0 and 0.5 ms; two more zeros of the resumed one's message.
    assert found["headway_router_itl_seconds_count",] == 6
    assert found["headway_router_itl_seconds_bucket", "0.001"] == 4
    assert found["headway_router_itl_seconds_bucket", "0.006"] == 5
    assert found["headway_router_itl_seconds_sum",] == pytest.approx(0.0195)
    assert found["headway_router_longest_gap_seconds_sum",] == pytest.approx(0.014)
    assert found["headway_router_tpot_seconds_sum",] == pytest.approx(0.0195 / 4)
    assert found["headway_router_tpot_seconds_count",] == 2
    assert found["headway_router_queue_seconds_bucket", "0.005"] == 1
    assert found["headway_router_output_tokens_total",] == 8
    assert found["headway_router_prompt_tokens_total",] == 12
    assert found["headway_router_calls_total", "Generate", "RESOURCE_EXHAUSTED"] == 1
    assert found["headway_router_calls_total", "Complete", "OTHER"] == 1
    assert found["headway_router_calls_in_flight",] == 0
    assert found["headway_router_refusals_total", "objective"] == 1
    assert found["headway_router_engines", "taking"] == 4
    assert found["headway_router_engines_lost_total", "silent"] == 1
    assert found["headway_router_replays_total", "silent"] == 4
    assert found["headway_router_queued",] == 3
    assert found["headway_router_relief_moves_total",] == 7


@pytest.mark.parametrize(
    ("text", "families"),
    [
        (engine_text(), engine.FAMILIES),
        (router_metrics().text(), router.FAMILIES),
    ],
    ids=["engine", "router"],
)
def test_every_family_is_there_with_all_its_series(text: str, families: tuple[Family, ...]):
    told = {found.name: found for found in text_string_to_metric_families(text)}
    for family in families:
        found = told.pop(family.name.removesuffix("_total"))
        assert found.type == family.kind.value
        assert found.documentation == family.help
        assert len(found.samples) == family.series
    assert not told


@pytest.mark.parametrize("families", [engine.FAMILIES, router.FAMILIES], ids=["engine", "router"])
def test_names_are_prometheus_names(families: tuple[Family, ...]):
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        if family.unit == "seconds" and family.kind is not Kind.COUNTER:
            assert family.name.endswith("_seconds")
        assert family.help.endswith(".")


def test_label_values_are_escaped():
    text = Lines(
        Family("a", Kind.GAUGE, "", "An a.", (Label("name"),)), {"name": 'C:\\x "y"\nz'}
    ).numbers([1])
    (found,) = text_string_to_metric_families(text)
    assert found.samples[0].labels == {"name": 'C:\\x "y"\nz'}


def test_series_stay_few():
    """The promise of docs/metrics.md at 1,000 engines and 100 routers."""
    per_engine = sum(family.series for family in engine.FAMILIES)
    per_router = sum(family.series for family in router.FAMILIES)
    assert per_engine <= 120
    assert per_router <= 600
    assert 1000 * per_engine + 100 * per_router <= 180_000


def test_what_happens_makes_no_new_series():
    metrics = router_metrics()
    before = samples(metrics.text()).keys()
    for number in range(1000):
        stream = metrics.stream(0.0, number)
        stream.tokens(1 + number % 3, number / 7)
        stream.over(number)
        metrics.began()
        metrics.ended("Generate", f"CODE_{number}")
    assert samples(metrics.text()).keys() == before


def test_samples_helper_reads_labels_in_order():
    assert samples('a{x="1",y="2"} 3\n') == Samples({("a", "1", "2"): 3.0})
