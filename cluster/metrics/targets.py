"""Where Prometheus finds everybody, in the form that its http_sd and file_sd read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

CONTENT_TYPE = "application/json"


_ROLE_NAME = itemgetter(1, 2, 0)


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
        for target in sorted(set(targets), key=_ROLE_NAME)
        if target.address
    ]
    # Without indent the encoder is the one in C: with 1,000 engines that is 1.5 ms, not 8.
    return json.dumps(groups) + "\n"
