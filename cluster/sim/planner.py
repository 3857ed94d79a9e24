"""The configuration with the most goodput per engine, found by simulating candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cluster.core.errors import ConfigError
from cluster.sim.experiment import Experiment
from cluster.sim.metrics import Summary

BUDGETS = (128, 256, 512, 768, 1024, 2048, 4096)
SEQUENCES = (32, 64, 128, 256, 512)
START = (512, 256)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One simulated configuration. summary: what came of it."""

    engines: int
    budget: int
    max_num_seqs: int
    summary: Summary

    @property
    def merit(self) -> tuple[float, float]:
        """More requests within the objectives is better; then the lower TTFT tail."""
        return (self.summary.slo_met_percent, -self.summary.ttft_p99_ms)


@dataclass(frozen=True, slots=True)
class Plan:
    """best: the fewest engines that reach the share, with their best budget and batch; when even
    max_engines do not (`reached` is False), the most goodput found."""

    best: Candidate
    reached: bool
    candidates: list[Candidate]


class Planner:
    """Fewest engines first, and for each number of engines one pass over the budgets and one over
    max_num_seqs, each at the other's best: the two hardly depend on each other.

    share: percent of requests that must keep the objectives.
    """

    def __init__(
        self,
        experiment: Experiment,
        max_engines: int,
        share: float = 99.0,
        tell: Callable[[Candidate], None] | None = None,
    ) -> None:
        if max_engines < 1:
            raise ConfigError(f"max_engines must be at least 1, got {max_engines}")
        if not 0 < share <= 100:
            raise ConfigError(f"share must be above 0 and at most 100 percent, got {share!r}")
        self._experiment = experiment
        self._max_engines = max_engines
        self._share = share
        self._tell = tell
        self._tried: dict[tuple[int, int, int], Candidate] = {}

    def search(self) -> Plan:
        """Doubles the engines until the share is reached, then halves the gap to the last miss."""
        failed, reached = 0, None
        for engines in self._growing():
            best = self._best_with(engines)
            if self._meets(best):
                reached = best
                break
            failed = engines
        while reached is not None and reached.engines - failed > 1:
            middle = (failed + reached.engines) // 2
            best = self._best_with(middle)
            if self._meets(best):
                reached = best
            else:
                failed = middle
        candidates = list(self._tried.values())
        best = reached or max(candidates, key=lambda c: c.summary.goodput_rps)
        return Plan(best, reached is not None, candidates)

    def _meets(self, candidate: Candidate) -> bool:
        return candidate.summary.slo_met_percent >= self._share

    def _growing(self) -> Iterator[int]:
        """1, 2, 4, ... and the most itself."""
        engines = 1
        while engines < self._max_engines:
            yield engines
            engines *= 2
        yield self._max_engines

    def _best_with(self, engines: int) -> Candidate:
        budget, seqs = START
        by_budget = [self._try(engines, b, seqs) for b in BUDGETS]
        budget = max(by_budget, key=lambda c: c.merit).budget
        by_seqs = [self._try(engines, budget, n) for n in SEQUENCES]
        return max([*by_budget, *by_seqs], key=lambda c: c.merit)

    def _try(self, engines: int, budget: int, seqs: int) -> Candidate:
        key = (engines, budget, seqs)
        if key not in self._tried:
            setup = replace(self._experiment.setup, budget=budget, max_num_seqs=seqs)
            experiment = replace(self._experiment, setup=setup, engines=engines)
            self._tried[key] = Candidate(engines, budget, seqs, experiment.run())
            if self._tell is not None:
                self._tell(self._tried[key])
        return self._tried[key]
