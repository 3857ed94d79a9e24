"""The scheduler beside a peer's, interleaved: on a shared machine only ratios of one run count."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cluster.bench import scheduler
from cluster.core.errors import ConfigError

SCRIPT = Path(__file__).with_name("peers") / "vllm_scheduler.py"
TIMEOUT_S = 600


class Ratio(NamedTuple):
    """Medians over the rounds, microseconds per step; ratio: the median of the rounds' ratios."""

    case: str
    ours_us: float
    theirs_us: float
    ratio: float


def beside_vllm(python: Path, model: Path, rounds: int, steps: int) -> list[Ratio]:
    """python: an interpreter that has vLLM. model: a folder for it; only its config is read.

    Raises ConfigError with the peer's last words if it does not run.
    """
    cases = {case.name: case for case in scheduler.CASES}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, theirs_us in _peer(python, model, steps).items():
            ours_us = scheduler.measure(cases[name], steps).step_p50
            pairs.setdefault(name, []).append((ours_us, theirs_us))
    return [
        Ratio(
            name,
            median(ours for ours, _ in found),
            median(theirs for _, theirs in found),
            median(ours / theirs for ours, theirs in found),
        )
        for name, found in pairs.items()
    ]


def _peer(python: Path, model: Path, steps: int) -> dict[str, float]:
    command = [str(python), str(SCRIPT), str(model), str(steps)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python}: {error}") from error
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise ConfigError(f"{python} cannot run vLLM's scheduler: {done.stderr.strip()[-400:]}")
    return {str(line["case"]): float(line["step_p50_us"]) for line in lines}
