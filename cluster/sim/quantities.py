"""Quantities as people write them on a command line."""

from __future__ import annotations

import math
import re

from cluster.core.errors import ConfigError
from cluster.sim.metrics import Objectives

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(s|ms|us|min|)")


def parse_seconds(text: str) -> float:
    """ "25ms", "1s", "0.5" in seconds. Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"not a time above 0 (like 25ms or 1.5s): {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def parse_objectives(text: str) -> Objectives:
    """ "ttft=1s,itl=25ms"; what is not named is not limited."""
    limits = {"ttft": math.inf, "tpot": math.inf, "itl": math.inf}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().lower()
        if not equals or name not in limits:
            raise ConfigError(f"--slo takes ttft=, tpot= and itl= with a time, got {part!r}")
        limits[name] = parse_seconds(value)
    return Objectives(limits["ttft"], limits["tpot"], limits["itl"])


def describe_objectives(objectives: Objectives) -> str:
    limits = {"TTFT": objectives.ttft_s, "TPOT": objectives.tpot_s, "ITL P99": objectives.itl_s}
    shown = [f"{n} {1e3 * v:g} ms" for n, v in limits.items() if math.isfinite(v)]
    return ", ".join(shown) or "none"
