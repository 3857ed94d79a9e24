"""docs/metrics.md lists what there is, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.core.outcome import Refusal
from cluster.metrics import engine, router
from cluster.metrics.__main__ import tables

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs/metrics.md").read_text()
RULES = (ROOT / "deploy/observability/alerts.yml").read_text()


def section(title: str) -> str:
    return DOCS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return [
        name
        for row in re.findall(r"(?m)^\| (`.*?) \|", text)
        for name in re.findall(r"`([^`]+)`", row)
    ]


def test_the_tables_are_generated():
    assert tables() in DOCS, "put what `python -m cluster.metrics` prints into docs/metrics.md"


def test_every_metric_is_listed_and_no_other():
    known = {family.name for family in (*engine.FAMILIES, *router.FAMILIES)}
    listed = re.findall(r"(?m)^\| `((?:headway|process)_\w+)` \|", DOCS)
    assert sorted(listed) == sorted(known)
    assert set(re.findall(r"`((?:headway|process)_\w+)`", DOCS)) == known


def test_every_alert_and_every_reason_is_listed():
    assert first_cells(section("Alerts")) == re.findall(r"- alert: (\w+)", RULES)
    reasons = section("The metrics").partition("### Reasons to refuse")[2]
    _, *listed = first_cells(reasons)
    assert sorted(listed) == sorted(reason.value for reason in Refusal)


def test_the_cardinality_is_what_it_is():
    per_engine = sum(family.series for family in engine.FAMILIES)
    per_router = sum(family.series for family in router.FAMILIES)
    text = section("Cardinality")
    assert f"| engine | {per_engine} | {1000 * per_engine:,} |" in text
    assert f"| router | {per_router} | {100 * per_router:,} |" in text
    assert f"| together | | {1000 * per_engine + 100 * per_router:,} |" in text
    config = (ROOT / "deploy/observability/prometheus.yml").read_text()
    assert f"An engine has {per_engine} series and a router {per_router};" in config
