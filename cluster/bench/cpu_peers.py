"""Ours beside other engines on the CPU: the same model, work and threads, each in a process of its
own, in turns. Of a shared machine only the ratios within one round count."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cluster.core.errors import ConfigError

OURS, OVER_GRPC = "headway", "headway over gRPC"
TIMEOUT_S = 900
_SCRIPTS = Path(__file__).with_name("peers")


@dataclass(frozen=True, slots=True)
class Contender:
    """name, and the command that measures it once and prints its figures as one JSON object."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """Medians over the rounds. ratio: of tokens per second to ours, the median of the rounds'
    ratios; itl_ratio: likewise, of the 99th percentile of the time between tokens."""

    name: str
    tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    ratio: float
    itl_ratio: float


@dataclass(frozen=True, slots=True)
class Work:
    """What all are given. budget: tokens per step."""

    model: Path
    dtype: str
    budget: int
    threads: int

    def arguments(self, model: Path | None = None) -> tuple[str, ...]:
        return str(model or self.model), self.dtype, str(self.budget), str(self.threads)


def contenders(
    work: Work,
    vllm_python: Path | None = None,
    openvino_python: Path | None = None,
    openvino_model: Path | None = None,
) -> list[Contender]:
    """Ours first, then the peers whose interpreters are given.

    Raises ConfigError for OpenVINO's interpreter without a model in its format.
    """
    found = [
        Contender(OURS, (sys.executable, "-m", "cluster.bench.engine_alone", *work.arguments())),
        Contender(OVER_GRPC, (sys.executable, "-m", "cluster.bench.over_grpc", *work.arguments())),
    ]
    if vllm_python is not None:
        script = str(_SCRIPTS / "vllm_generate.py")
        found.append(Contender("vLLM", (str(vllm_python), script, *work.arguments())))
    if openvino_python is not None:
        if openvino_model is None:
            raise ConfigError(
                "OpenVINO needs openvino_model, a folder that `optimum-cli export openvino "
                "--weight-format fp32 --task text-generation-with-past` made of the model"
            )
        script = str(_SCRIPTS / "openvino_generate.py")
        arguments = work.arguments(openvino_model)
        found.append(Contender("OpenVINO GenAI", (str(openvino_python), script, *arguments)))
    return found


def run_once(contender: Contender) -> dict[str, float]:
    """Raises ConfigError with the contender's last words if it does not run."""
    try:
        done = subprocess.run(
            contender.command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{contender.name}: {error}") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise ConfigError(f"{contender.name} does not run: {done.stderr.strip()[-600:]}")
    found = json.loads(lines[-1])
    return {str(key): float(value) for key, value in found.items()}


def compare(
    entered: Sequence[Contender],
    rounds: int,
    run: Callable[[Contender], dict[str, float]] = run_once,
) -> list[Standing]:
    """entered: the first is what the others are compared with. In the order of `entered`."""
    figures: list[list[dict[str, float]]] = [[] for _ in entered]
    for turn in range(rounds):
        # Whoever went first in one round goes last in the next.
        order = range(len(entered)) if turn % 2 == 0 else range(len(entered) - 1, -1, -1)
        for at in order:
            figures[at].append(run(entered[at]))
    return [
        _standing(contender.name, own, figures[0])
        for contender, own in zip(entered, figures, strict=True)
    ]


def _standing(name: str, own: list[dict[str, float]], first: list[dict[str, float]]) -> Standing:
    def middle(key: str) -> float:
        return median(found[key] for found in own)

    def ratio(key: str) -> float:
        return median(a[key] / b[key] for a, b in zip(own, first, strict=True))

    return Standing(
        name,
        middle("tokens_per_s"),
        middle("ttft_p50_ms"),
        middle("itl_p50_ms"),
        middle("itl_p99_ms"),
        ratio("tokens_per_s"),
        ratio("itl_p99_ms"),
    )
