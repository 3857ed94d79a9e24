"""Servers beside each other in one run: the same schedule, in turns, round after round.

One at a time, because two on one machine would measure each other; in turns, because a shared
machine's own speed drifts, so that only what ran close together compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from urllib.parse import urldefrag

from cluster.core.errors import ConfigError
from loadtests.compare import Run, compare
from loadtests.job import Job
from loadtests.outcome import Outcome
from loadtests.report import write_outcome
from loadtests.targets.base import TargetSpec

TARGET_FORM = "NAME=HOST:PORT for Headway, NAME=http://HOST:PORT#MODEL for OpenAI's protocol"

Measure = Callable[[Job], Outcome]


@dataclass(frozen=True, slots=True)
class Rival:
    """A server, and what it is called in the table."""

    name: str
    target: TargetSpec


def parse_rival(text: str, like: TargetSpec) -> Rival:
    """text: see TARGET_FORM. like: everything that the text leaves out.

    Raises ConfigError for a text that names no server.
    """
    name, _, address = text.partition("=")
    if not name or not address or "/" in name:
        raise ConfigError(f"{text!r} names no server: {TARGET_FORM}")
    if not address.startswith(("http://", "https://")):
        return Rival(name, replace(like, kind="headway", address=address))
    url, model = urldefrag(address)
    if not (model or like.model):
        raise ConfigError(f"{text!r} names no model: end it with #MODEL, or give --model")
    return Rival(name, replace(like, kind="openai", address=url, model=model or like.model))


@dataclass(frozen=True, slots=True)
class Standing:
    """What the rounds of one server came to. runs: a result folder per round."""

    name: str
    runs: list[Run]

    @property
    def pooled(self) -> Run:
        """All requests of all rounds."""
        records = [record for run in self.runs for record in run.records]
        return Run(self.name, self.runs[0].summary, records)

    @property
    def tokens_per_s(self) -> list[float]:
        return [float(run.summary["tokens_per_s"]) for run in self.runs]

    @property
    def failed(self) -> int:
        return sum(sum(run.summary["errors"].values()) for run in self.runs)


def run_beside(
    job: Job, rivals: Sequence[Rival], rounds: int, folder: Path, measure: Measure
) -> tuple[list[Standing], list[Outcome]]:
    """job: its target is replaced. measure: sends a job and judges it. Each run goes to
    folder/NAME/ROUND, and round r draws with the scenario's seed + r.

    Raises ConfigError for fewer than two servers, for two of one name, for no round, and for a
    server of which not a single request could be measured.
    """
    names = [rival.name for rival in rivals]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"give two servers or more, each with a name of its own, got {names}")
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {rounds}")
    runs: dict[str, list[Run]] = {name: [] for name in names}
    outcomes: list[Outcome] = []
    for number in range(rounds):
        scenario = replace(job.scenario, seed=job.scenario.seed + number)
        # Whoever went first in one round goes last in the next.
        for rival in rivals if number % 2 == 0 else reversed(rivals):
            outcome = measure(Job(scenario, rival.target))
            written = folder / rival.name / f"{number}"
            write_outcome(outcome, written)
            runs[rival.name].append(Run.read(written))
            outcomes.append(outcome)
    return [Standing(name, found) for name, found in runs.items()], outcomes


def beside_lines(standings: Sequence[Standing]) -> list[str]:
    """A table per metric: the first server in full, the others also as a ratio to it."""
    first = standings[0]
    shown = [f"in turns over {len(first.runs)} rounds; ratios are to {first.name}"]
    for standing in standings:
        ratio = median(
            b / a for a, b in zip(first.tokens_per_s, standing.tokens_per_s, strict=True)
        )
        shown.append(
            f"{standing.name}: {len(standing.pooled.records)} requests measured, "
            f"{standing.failed} failed, {median(standing.tokens_per_s):.1f} tokens/s "
            f"({ratio:.2f} of {first.name}'s)"
        )
    for standing in standings[1:]:
        shown.append(f"{'ms':16}{first.name:>14}{standing.name:>14}{'ratio':>8}   95% interval")
        for row in compare(first.pooled, standing.pooled):
            sure = "" if row.certain else "  (may be chance)"
            shown.append(
                f"{row.name:16}{row.a:>14.1f}{row.b:>14.1f}{row.ratio:>8.3f}"
                f"   {row.low:.3f} to {row.high:.3f}{sure}"
            )
    return shown
