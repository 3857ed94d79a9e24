"""Stretches of like steps taken at once, for speed: the real scheduler with one verb more.

Between two events (an arrival, a finish, a prompt) a step differs from the one before only in that
every context is one longer. The plans of such steps are known without asking the batching policy,
so a stretch of them is applied in one go. Times come out bit for bit as step by step, and so do
all counters; only the gauge of tokens per second sees a stretch's tokens at its end. Where anything
could make a difference (somebody waits, a learning budget, a prefix cache, padding), there is no
stretch and every step is planned.
"""

from __future__ import annotations

from typing import NamedTuple

from cluster.core.budget import FixedBudget
from cluster.core.config import SchedulerConfig, blocks_for
from cluster.core.lifecycle import State
from cluster.core.plan import StepPlan
from cluster.core.prefix import NoPrefixCache
from cluster.core.scheduler import Policies, Scheduler
from cluster.core.sequence import Sequence
from cluster.engine.core import SURVEY_PERIOD_S, EngineCore, StreamStats

COASTING_POLICIES = frozenset({"static", "dynamic", "continuous", "fused", "chunked"})
"""Each of them gives every running decode its token when there is nothing else to do."""


class CoastingScheduler(Scheduler):
    """Plans and commits as its base does, and can be moved ahead by several decode steps."""

    def __init__(self, config: SchedulerConfig, policies: Policies | None = None) -> None:
        super().__init__(config, policies)
        self._granted = 0

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan is not None:
            self._granted = plan.budget
        return plan

    def quiet_steps(self, token: int) -> int:
        """Steps from now on that only decode, if every row says `token`: none but the last ends a
        sequence, and the free blocks suffice. 0 when the next step has to be planned."""
        running = self.running
        if (
            not running
            or self.padding
            or len(self.queue)
            or self.in_flight is not None
            or self.batching.name not in COASTING_POLICIES
            or not isinstance(self.budget, FixedBudget)
            or not isinstance(self.kv.prefix, NoPrefixCache)
            or self._granted < len(running)
        ):
            return 0
        steps = 1 << 30
        for sequence in running:
            total = len(sequence.tokens)
            if (
                total - sequence.computed != 1
                or total == sequence.prompt_len
                or token in sequence.stop_ids
            ):
                return 0
            left = sequence.max_total - total
            if left < steps:
                steps = left
        return steps if self._have_blocks(steps) else 0

    def coast(self, steps: int, token: int) -> list[Sequence]:
        """Apply `steps` quiet steps, at most quiet_steps(), in which every row says `token`.
        Returns the sequences that the last one has ended."""
        running, counters = self.running, self.counters
        ended: list[Sequence] = []
        tokens = [token] * steps
        for sequence in running:
            sequence.hold(sequence.computed + steps)
            sequence.tokens.extend(tokens)
            if sequence.computed > sequence.capacity:
                self.kv.grow_to(sequence, sequence.computed)
            if len(sequence.tokens) >= sequence.max_total:
                ended.append(sequence)
        rows = steps * len(running)
        self._turn += rows
        for turn, sequence in enumerate(running, start=self._turn - len(running) + 1):
            sequence.turn = turn
        counters.steps += steps
        counters.computed_tokens += rows
        counters.emitted_tokens += rows
        self.wait_cause = ""
        self.next_wake_s = None
        for sequence in ended:
            self._reservation.observe(sequence)
            self._finish(sequence)
        if ended:
            self.running = [s for s in running if s.state is State.RUNNING]
            self._end_batch()
        return ended

    def _have_blocks(self, steps: int) -> bool:
        """Whether every running sequence can grow by so many positions."""
        free, size = self.kv.free, self.config.block_size
        if len(self.running) * blocks_for(steps + size, size) <= free:
            return True
        needed = 0
        for sequence in self.running:
            missing = sequence.computed + steps - sequence.capacity
            if missing > 0:
                needed += blocks_for(missing, size)
        return needed <= free


class Stretch(NamedTuple):
    """Steps taken at once. ends: when each was done. streams: who got a token in each of them.
    finished: (stream, output tokens, stats) of those that the last one has ended."""

    ends: list[float]
    streams: list[int]
    finished: list[tuple[int, int, StreamStats]]


class CoastingCore(EngineCore):
    """An EngineCore over a CoastingScheduler."""

    def __init__(
        self, scheduler: CoastingScheduler, survey_period_s: float = SURVEY_PERIOD_S
    ) -> None:
        super().__init__(scheduler, survey_period_s)
        self._coasting = scheduler

    def quiet(self, token: int) -> tuple[int, int, int]:
        """(quiet steps, sequences in each, positions that the first one reads)."""
        steps = self._coasting.quiet_steps(token)
        if not steps:
            return 0, 0, 0
        running = self._coasting.running
        return steps, len(running), sum([len(s.tokens) for s in running])

    def coast(self, ends: list[float], token: int) -> Stretch:
        """Take the steps that were done at `ends`."""
        keys = self._keys
        streams = [keys[s.seq_id].stream for s in self._coasting.running]
        finished: list[tuple[int, int, StreamStats]] = []
        for sequence in self._coasting.coast(len(ends), token):
            stream, stats = keys[sequence.seq_id].stream, self._final_stats(sequence.seq_id)
            finished.append((stream, sequence.emitted, stats))
            self._forget(sequence.seq_id)
        self._rate.add(ends[-1], len(streams) * len(ends))
        return Stretch(ends, streams, finished)
