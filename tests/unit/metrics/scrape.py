"""Scrapes as Prometheus' own Python library reads them."""

from __future__ import annotations

import urllib.request
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

Samples: TypeAlias = dict[tuple[str, ...], float]


def samples(text: str) -> Samples:
    """Values by (name, label values in order)."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fetch(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return str(answer.read().decode())
