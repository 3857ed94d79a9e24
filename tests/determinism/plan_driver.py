"""A scheduler small enough to read in one go: first come first served, decodes first.

It exists so that the worker's tests do not depend on the real one; `replay_every` drops each
running sequence now and then and brings it back with its tokens, as a preemption does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cluster.core.plan import NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from workers.executor import LocalExecutor


@dataclass
class Request:
    prompt: list[int]
    sampling: SamplingParams


@dataclass
class Driving:
    """How to cut the work into steps. replay_every: emitted tokens between drops, 0 for never."""

    budget: int
    batch: int
    replay_every: int = 0
    seed: int = 0


@dataclass
class _Live:
    number: int
    seq_id: int
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    computed: int = 0
    emitted_here: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        emitted = len(self.tokens) - self.prompt_len
        if emitted >= self.sampling.max_tokens:
            return True
        return emitted > 0 and self.tokens[-1] in self.sampling.stop_token_ids


class PlanDriver:
    """Runs requests to their end on an executor and returns the emitted tokens of each."""

    def __init__(self, executor: LocalExecutor, driving: Driving) -> None:
        self._executor = executor
        self._driving = driving
        self._free = list(range(1, executor.info.num_blocks + 1))
        random.Random(driving.seed).shuffle(self._free)
        self._step = 0
        self._next_id = 0
        self._released: list[int] = []

    def run(self, requests: list[Request]) -> list[list[int]]:
        waiting = [
            _Live(n, 0, list(r.prompt), len(r.prompt), r.sampling) for n, r in enumerate(requests)
        ]
        running: list[_Live] = []
        outputs: list[list[int]] = [[] for _ in requests]
        while waiting or running:
            admitted = self._admit(waiting, running)
            self._run_step(running, admitted)
            for live in list(running):
                if live.finished:
                    running.remove(live)
                    outputs[live.number] = live.tokens[live.prompt_len :]
                    self._drop(live)
                elif self._due_for_replay(live):
                    running.remove(live)
                    self._drop(live)
                    waiting.insert(0, live)
        # An empty step carries the last releases, so that an executor can be driven again.
        self._submit([], [], 0, 0)
        return outputs

    def _admit(self, waiting: list[_Live], running: list[_Live]) -> list[_Live]:
        admitted = []
        while waiting and len(running) < self._driving.batch:
            live = waiting.pop(0)
            self._next_id += 1
            live.seq_id = self._next_id
            running.append(live)
            admitted.append(live)
        return admitted

    def _due_for_replay(self, live: _Live) -> bool:
        every = self._driving.replay_every
        return bool(every) and live.emitted_here >= every

    def _drop(self, live: _Live) -> None:
        self._released.append(live.seq_id)
        self._free.extend(live.blocks)
        live.blocks = []
        live.computed = live.emitted_here = 0

    def _run_step(self, running: list[_Live], admitted: list[_Live]) -> None:
        budget = self._driving.budget
        # Decodes first; the sort is stable, so that prefills keep their order of arrival.
        running.sort(key=lambda live: len(live.tokens) - live.computed > 1)
        rows, planned, decodes, total = [], [], 0, 0
        for live in running:
            count = min(len(live.tokens) - live.computed, budget - total)
            if count == 0:
                break
            end = live.computed + count
            missing = -(-end // self._executor.info.block_size) - len(live.blocks)
            new_blocks = [self._free.pop() for _ in range(missing)]
            live.blocks += new_blocks
            samples = end == len(live.tokens)
            if count == 1 and samples and decodes == len(rows):
                decodes += 1
            rows.append(Row(live.seq_id, live.computed, count, samples, new_blocks))
            planned.append((live, samples))
            live.computed = end
            total += count
        new = [NewSequence(v.seq_id, list(v.tokens), v.prompt_len, v.sampling) for v in admitted]
        tokens = iter(self._submit(rows, new, decodes, total))
        for live, samples in planned:
            if samples:
                live.tokens.append(next(tokens))
                live.emitted_here += 1

    def _submit(
        self, rows: list[Row], admitted: list[NewSequence], decodes: int, total: int
    ) -> list[int]:
        self._step += 1
        released, self._released = self._released, []
        plan = StepPlan(self._step, rows, admitted, released, decodes, total)
        result = self._executor.submit(plan).wait()
        assert not result.failed
        return result.token_ids
