"""What a report draws: steps over time, and how full the KV pools were. Bounded memory."""

from __future__ import annotations

from collections import deque
from enum import Enum
from itertools import islice
from typing import NamedTuple

from cluster.core.plan import StepPlan
from cluster.engine.core import StepReport
from cluster.sim.engine import SimEngine

FIRST_STEPS = 300
AROUND = 60
"""Steps kept before and after the longest one."""
KV_POINTS = 1200


class StepKind(Enum):
    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


class StepSpan(NamedTuple):
    """One step of one engine. Times in seconds."""

    start_s: float
    end_s: float
    kind: StepKind
    tokens: int
    rows: int


class KvUse:
    """Mean share of the blocks in use over equal spans of time, at most 2 KV_POINTS of them."""

    def __init__(self) -> None:
        self._span_s = 0.01
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, now: float, share: float) -> None:
        place = int(now / self._span_s)
        while place >= 2 * KV_POINTS:
            self._halve()
            place = int(now / self._span_s)
        missing = place + 1 - len(self._sums)
        if missing > 0:
            self._sums += [0.0] * missing
            self._counts += [0] * missing
        self._sums[place] += share
        self._counts[place] += 1

    def points(self) -> list[tuple[float, float]]:
        """(time, share) where there was a step."""
        pairs = zip(self._sums, self._counts, strict=True)
        return [
            ((i + 0.5) * self._span_s, total / count)
            for i, (total, count) in enumerate(pairs)
            if count
        ]

    def _halve(self) -> None:
        self._span_s *= 2
        if len(self._sums) % 2:
            self._sums.append(0.0)
            self._counts.append(0)
        self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
        self._counts = [a + b for a, b in zip(self._counts[::2], self._counts[1::2], strict=True)]


class Recorder:
    """An Observer: the first steps of the first engine, those around its longest, KV use of all."""

    def __init__(self) -> None:
        self.first: list[StepSpan] = []
        self.around_longest: list[StepSpan] = []
        self.kv_use = KvUse()
        self._engine = ""
        self._recent: deque[StepSpan] = deque(maxlen=AROUND)
        self._longest_s = 0.0
        self._following = 0

    def stepped(self, engine: SimEngine, plan: StepPlan, report: StepReport, now: float) -> None:
        load = report.load
        self.kv_use.add(now, 1.0 - load.blocks_free / load.blocks_total)
        self._engine = self._engine or engine.name
        if engine.name != self._engine:
            return
        span = StepSpan(engine.started_s, now, kind_of(plan), plan.num_tokens, len(plan.rows))
        if len(self.first) < FIRST_STEPS:
            self.first.append(span)
        if span.end_s - span.start_s > self._longest_s:
            self._longest_s = span.end_s - span.start_s
            self.around_longest = [*islice(self._recent, AROUND), span]
            self._following = AROUND
        elif self._following:
            self._following -= 1
            self.around_longest.append(span)
        self._recent.append(span)


def kind_of(plan: StepPlan) -> StepKind:
    if plan.num_tokens == len(plan.rows):
        return StepKind.DECODE
    return StepKind.MIXED if plan.num_decodes else StepKind.PREFILL
