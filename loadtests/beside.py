"""Servers beside each other in one run: the same schedule, in turns, round after round.

One at a time, because two on one machine would measure each other; in turns, because a shared
machine's own speed drifts, so that only what ran close together compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from urllib.parse import urldefrag

from cluster.core.errors import ConfigError, HeadwayError
from loadtests.compare import Run, difference_lines
from loadtests.job import Job
from loadtests.objectives import EXIT_INVALID, EXIT_MET, EXIT_MISSED
from loadtests.outcome import Outcome
from loadtests.report import write_outcome
from loadtests.targets.base import TargetSpec

TARGET_FORM = "NAME=HOST:PORT for Headway, NAME=http://HOST:PORT#MODEL for OpenAI's protocol"

Measure = Callable[[Job], Outcome]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
    if not address or not _NAME.fullmatch(name):
        # The name is a folder's, too.
        raise ConfigError(
            f"{text!r} names no server: {TARGET_FORM}; a name is of letters, digits, '.', '_', '-'"
        )
    if not address.startswith(("http://", "https://")):
        return Rival(name, replace(like, kind="headway", address=address))
    url, model = urldefrag(address)
    if not (model or like.model):
        raise ConfigError(f"{text!r} names no model: end it with #MODEL, or give --model")
    return Rival(name, replace(like, kind="openai", address=url, model=model or like.model))


def check_rivals(rivals: Sequence[Rival], rounds: int) -> None:
    """Raises ConfigError for what makes no comparison."""
    names = [rival.name for rival in rivals]
    if len(names) < 2:
        raise ConfigError(f"give two servers or more to compare, got {len(names)}: {TARGET_FORM}")
    if len(set(names)) < len(names):
        raise ConfigError(f"give each server a name of its own, got {', '.join(names)}")
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {rounds}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of one server. run: what was measured; None where nothing was.
    problems: why the run does not count, or not for much; for a reader."""

    rival: Rival
    number: int
    exit_code: int
    run: Run | None
    problems: list[str]


def take_turns(
    job: Job, rivals: Sequence[Rival], rounds: int, folder: Path, measure: Measure
) -> Iterator[Turn]:
    """job: its target is replaced. measure: sends a job and judges it. Each run goes to
    folder/NAME/ROUND, and round r draws with the scenario's seed + r. A server that cannot be
    measured costs its own turn only.
    """
    for number in range(rounds):
        scenario = replace(job.scenario, seed=job.scenario.seed + number)
        # Whoever went first in one round goes last in the next.
        for rival in rivals if number % 2 == 0 else reversed(rivals):
            try:
                outcome = measure(Job(scenario, rival.target))
            except HeadwayError as error:
                yield Turn(rival, number, EXIT_INVALID, None, [str(error)])
                continue
            written = folder / rival.name / f"{number}"
            write_outcome(outcome, written)
            run = Run.read(written) if outcome.results.counts.measured else None
            yield Turn(rival, number, outcome.exit_code, run, _problems(outcome))


def _problems(outcome: Outcome) -> list[str]:
    errors = [f"error {name}: {count}" for name, count in outcome.results.errors.items()]
    return errors + [check.line() for check in outcome.validity if not check.passed]


def exit_code_of(turns: Sequence[Turn]) -> int:
    """The worst of the turns: invalid before missed before met."""
    codes = {turn.exit_code for turn in turns}
    return next((code for code in (EXIT_INVALID, EXIT_MISSED) if code in codes), EXIT_MET)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the rounds of one server came to. runs: by round; those where nothing was measured are
    not in it."""

    name: str
    runs: dict[int, Run]

    @property
    def pooled(self) -> Run:
        """All requests of all rounds."""
        runs = list(self.runs.values())
        return Run(self.name, runs[0].summary, [record for run in runs for record in run.records])

    def tokens_per_s(self, number: int) -> float:
        return float(self.runs[number].summary["tokens_per_s"])

    @property
    def failed(self) -> int:
        return sum(sum(run.summary["errors"].values()) for run in self.runs.values())


def standings_of(turns: Sequence[Turn]) -> list[Standing]:
    """Of the servers that were measured, in the order in which they had their first turns."""
    found: dict[str, dict[int, Run]] = {}
    for turn in turns:
        if turn.run is not None:
            found.setdefault(turn.rival.name, {})[turn.number] = turn.run
    return [Standing(name, runs) for name, runs in found.items()]


def beside_lines(standings: Sequence[Standing]) -> list[str]:
    """A table per metric: the first server's values, and the others' also as ratios to them."""
    if not standings:
        return ["no server was measured"]
    first = standings[0]
    shown = [f"in turns over {len(first.runs)} rounds; ratios are to {first.name}"]
    for standing in standings:
        rates = [standing.tokens_per_s(number) for number in standing.runs]
        line = (
            f"{standing.name}: {len(standing.pooled.records)} requests measured, "
            f"{standing.failed} failed, {median(rates):.1f} tokens/s"
        )
        ratios = [
            standing.tokens_per_s(number) / first.tokens_per_s(number)
            for number in standing.runs
            if number in first.runs
        ]
        if standing is not first and ratios:
            line += f" ({median(ratios):.2f} of {first.name}'s)"
        shown.append(line)
    for standing in standings[1:]:
        heads = (first.name, standing.name, "ratio")
        shown += difference_lines(first.pooled, standing.pooled, heads, width=14)
    return shown
