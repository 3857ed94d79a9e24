"""Whole steps of a model, and what the sampler and the host have in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cluster.core.config import WorkerConfig, blocks_for
from cluster.core.plan import NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from workers import memory
from workers.bench_cpu.turns import Comparison, compare, microseconds, reader, take_turns
from workers.executor import LocalExecutor
from workers.inputs import InputBuilder, InputLimits
from workers.sampler import Draw, sample
from workers.sequences import SequenceTable

BLOCK_SIZE = 16
HOST_LIMIT_US = 300.0
_MANY = 1_000_000


@dataclass(frozen=True, slots=True)
class StepCase:
    """batch sequences of `context` tokens each. prompt: of the long one that comes in beside them;
    budget: tokens of its chunks. requests: served for the memory's sake."""

    batch: int = 16
    context: int = 512
    prompt: int = 4096
    budget: int = 256
    requests: int = 128


class DecodeBatch:
    """The case's sequences on an executor of its own, decoding; with room for `steps` steps and for
    the long prompt."""

    def __init__(self, model: Path, dtype: str, backend: str, case: StepCase, steps: int) -> None:
        self._case = case
        self._blocks = blocks_for(case.context + steps + 1, BLOCK_SIZE)
        # The long prompt's come after those of the batch.
        self._spare = list(
            range(1 + case.batch * self._blocks, 1 + case.batch * self._blocks + self._long_blocks)
        )
        self.executor = LocalExecutor(
            WorkerConfig(
                str(model),
                dtype=dtype,
                device="cpu",
                attention_backend=backend,
                block_size=BLOCK_SIZE,
                num_blocks=case.batch * self._blocks + self._long_blocks,
                max_num_batched_tokens=max(case.context, case.prompt + case.batch),
                max_num_seqs=case.batch + 1,
                threads=torch.get_num_threads(),
            )
        )
        self._computed = case.context
        for number in range(case.batch):
            own = list(range(number * self._blocks + 1, (number + 1) * self._blocks + 1))
            row = Row(number, 0, case.context, True, own)
            admitted = [_sequence(number, case.context)]
            self._run(StepPlan(0, [row], admitted, [], 0, case.context))

    @property
    def _long_blocks(self) -> int:
        return blocks_for(self._case.prompt, BLOCK_SIZE)

    @property
    def bytes_per_step(self) -> int:
        """What a step must read at least: the weights and the cached context."""
        info = self.executor.info
        return info.weight_bytes + self._case.batch * self._computed * info.kv_bytes_per_token

    def step(self) -> None:
        self._run(StepPlan(1, self._rows(), [], [], self._case.batch, self._case.batch))
        self._computed += 1

    def longest_gap_us(self, chunk: int) -> float:
        """The longest step while the long prompt comes in by so many tokens at a time."""
        number, prompt = self._case.batch, self._case.prompt
        gaps: list[float] = []
        for start in range(0, prompt, chunk):
            count = min(chunk, prompt - start)
            rows = [*self._rows(), Row(number, start, count, start + count == prompt, [])]
            admitted = []
            if start == 0:
                rows[-1] = rows[-1]._replace(new_blocks=self._spare)
                admitted = [_sequence(number, prompt)]
            plan = StepPlan(1, rows, admitted, [], self._case.batch, self._case.batch + count)
            gaps.append(microseconds(partial(self._run, plan)))
            self._computed += 1
        self._run(StepPlan(1, [], [], [number]))
        return max(gaps)

    def serve_short_one(self) -> None:
        """A request of a few tokens, from admission to release."""
        number = self._case.batch
        row = Row(number, 0, 8, True, self._spare[:1])
        self._run(StepPlan(1, [row], [_sequence(number, 8)], [], 0, 8))
        self._run(StepPlan(1, [Row(number, 8, 1, True, [])], [], [], 1, 1))
        self._run(StepPlan(1, [], [], [number]))

    def _rows(self) -> list[Row]:
        return [Row(number, self._computed, 1, True, []) for number in range(self._case.batch)]

    def _run(self, plan: StepPlan) -> None:
        self.executor.submit(plan).wait()


def bench_steps(model: Path, dtype: str, case: StepCase, rounds: int) -> list[Comparison]:
    """A decode step on native kernels, on torch's, and reading its bytes once; the sampler and the
    host's work as shares of it."""
    steps = rounds + 1
    batches = {n: DecodeBatch(model, dtype, n, case, steps) for n in ("native", "torch")}
    info = batches["native"].executor.info
    ways: dict[str, Callable[[], object]] = {n: batch.step for n, batch in batches.items()}
    ways["read"] = reader(batches["native"].bytes_per_step)
    ways["greedy"] = _sampler(case.batch, info.vocab_size, dtype, temperature=0.0)
    ways["sampler"] = _sampler(case.batch, info.vocab_size, dtype, temperature=0.8)
    filters = {"top_k": 50, "top_p": 0.9}
    ways["filters"] = _sampler(case.batch, info.vocab_size, dtype, temperature=0.8, **filters)
    ways["host"] = HostWork(case, steps).step
    times = take_turns(ways, rounds)
    times["limit"] = [HOST_LIMIT_US] * rounds
    name = f"decode step of {model.name}, {case.batch} x {case.context}"
    return [
        compare(name, dtype, times, ("native", "torch"), 0.0),
        compare(name, dtype, times, ("native", "read"), 1.8),
        compare(f"greedy sampler, {case.batch} rows", dtype, times, ("greedy", "native"), 0.1),
        compare(f"sampler, {case.batch} rows", dtype, times, ("sampler", "native"), 0.1),
        compare(
            f"sampler with filters, {case.batch} rows", dtype, times, ("filters", "native"), 0.1
        ),
        compare(f"host work, {case.batch} sequences", dtype, times, ("host", "limit"), 1.0),
    ]


def bench_long_prompt(model: Path, dtype: str, case: StepCase) -> list[Comparison]:
    """The longest gap between tokens while a long prompt comes in, by chunks and in one step."""
    chunks = -(-case.prompt // case.budget)
    batch = DecodeBatch(model, dtype, "native", case, steps=chunks + 1)
    times = {
        "chunked": [batch.longest_gap_us(case.budget - case.batch)],
        "whole": [batch.longest_gap_us(case.prompt)],
    }
    name = f"longest gap beside a prompt of {case.prompt}"
    return [compare(name, dtype, times, ("chunked", "whole"), 0.2)]


def bench_memory(model: Path, dtype: str, case: StepCase) -> list[Comparison]:
    """Resident memory after many requests against that after a few: nothing may grow with them."""
    batch = DecodeBatch(model, dtype, "native", case, steps=1)
    found: dict[str, list[float]] = {}
    for name, count in (("before", 16), ("after", case.requests)):
        for _ in range(count):
            batch.serve_short_one()
        found[name] = [memory.resident_bytes() / 2**20]
    name = f"resident memory, {case.requests} requests later"
    return [compare(name, dtype, found, ("after", "before"), 1.02, "MiB")]


class HostWork:
    """What the host does in a step before the model runs: laying out its inputs."""

    def __init__(self, case: StepCase, steps: int) -> None:
        blocks = blocks_for(case.context + steps + 1, BLOCK_SIZE)
        length = blocks * BLOCK_SIZE
        self._table = SequenceTable(case.batch, length, BLOCK_SIZE, _MANY)
        limits = InputLimits(case.batch, case.batch, case.batch * blocks)
        self._inputs = InputBuilder(self._table, limits, torch.device("cpu"))
        self._computed, self._batch = case.context, case.batch
        for number in range(case.batch):
            self._table.admit(_sequence(number, case.context + 1))
            own = list(range(number * blocks + 1, (number + 1) * blocks + 1))
            self._table.grant(number, own)

    def step(self) -> None:
        rows = [Row(number, self._computed, 1, True, []) for number in range(self._batch)]
        inputs = self._inputs.build(StepPlan(1, rows, [], [], self._batch, self._batch))
        for lane in inputs.lanes:
            self._table.settle(self._table.expect(lane), 5)
        self._computed += 1


def _sampler(rows: int, vocab: int, dtype: str, **sampling: Any) -> Callable[[], object]:
    logits = 3 * torch.randn(rows, vocab)
    logits = logits.to(getattr(torch, dtype))
    params = SamplingParams(max_tokens=8, seed=1, **sampling)
    return partial(sample, logits, [Draw(params, 0)] * rows)


def _sequence(number: int, length: int) -> NewSequence:
    tokens = [(7 * number + 13 * i) % 1000 for i in range(length)]
    return NewSequence(number, tokens, length, SamplingParams(max_tokens=_MANY, temperature=0.0))
