"""Where Prometheus finds everybody, in the form that its http_sd and file_sd read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

CONTENT_TYPE = "application/json"


class Target(NamedTuple):
    """One process to scrape. address: host:port of its metrics. role: "router" or "engine". name:
    its id."""

    address: str
    role: str
    name: str


def discovery(targets: Iterable[Target]) -> str:
    """Those that serve metrics, as JSON, in a stable order."""
    groups = [
        {"targets": [target.address], "labels": {"role": target.role, "id": target.name}}
        for target in sorted(set(targets), key=lambda t: (t.role, t.name, t.address))
        if target.address
    ]
    return json.dumps(groups, indent=1) + "\n"
