"""Whole steps of a model: decode steps of several sizes, and what a long prompt does to them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.core.config import WorkerConfig, blocks_for
from cluster.core.plan import NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from workers.bench_gpu.measures import Measurement, percentile
from workers.executor import LocalExecutor

_WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepSuite:
    """What is measured, sizes in tokens and steps.

    decode_batches: sequences of `context` tokens decoding together. Beside `running` of them,
    `prompts` prompts of `prompt` tokens come in one after the other, `gap` steps apart, whole or
    in chunks that fill a step up to `chunk_budget` tokens.
    """

    decode_batches: tuple[int, ...]
    context: int
    steps: int
    running: int
    prompt: int
    prompts: int
    gap: int
    chunk_budget: int

    @property
    def most_seqs(self) -> int:
        return max(*self.decode_batches, self.running + 1)

    @property
    def cache_tokens(self) -> int:
        """KV tokens of the largest scenario, with room for what is generated."""
        decoded = _WARMUP_STEPS + 2 * self.steps + 1
        decoding = max(self.decode_batches) * (self.context + decoded)
        chunks = -(-self.prompt // (self.chunk_budget - self.running))
        generated = _WARMUP_STEPS + self.prompts * (self.gap + chunks)
        return max(decoding, self.running * (self.context + generated) + self.prompt)


class Decoding:
    """Sequences on an executor, each with its own blocks, decoding step after step."""

    def __init__(self, executor: LocalExecutor, budget: int) -> None:
        """budget: tokens that a step may have at most, for prefilling."""
        self._executor = executor
        self._budget = budget
        self._free = list(range(executor.info.num_blocks, 0, -1))
        self._blocks: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._released: list[int] = []
        self._next_id = 0
        self._step = 0

    def admit(self, length: int) -> NewSequence:
        """A sequence of `length` tokens of which none is computed."""
        self._next_id += 1
        vocab = self._executor.info.vocab_size
        tokens = [(31 * self._next_id + 17 * i) % vocab for i in range(length)]
        self._blocks[self._next_id], self._computed[self._next_id] = [], 0
        room = self._executor.info.max_model_len - length
        sampling = SamplingParams(max_tokens=room, temperature=0.0)
        return NewSequence(self._next_id, tokens, length, sampling)

    def prefill(self, length: int) -> int:
        """Compute a new sequence of `length` tokens alone; returns its id."""
        new = self.admit(length)
        admitted = [new]
        while self._computed[new.seq_id] < length:
            count = min(self._budget, length - self._computed[new.seq_id])
            self.step([], admitted, (new, count))
            admitted = []
        return new.seq_id

    def release(self, seq_id: int) -> None:
        """The executor is told with the next step."""
        self._free += self._blocks.pop(seq_id)
        del self._computed[seq_id]
        self._released.append(seq_id)

    def computed(self, seq_id: int) -> int:
        """Tokens of a sequence whose keys and values are in the cache."""
        return self._computed[seq_id]

    def step(
        self,
        decodes: list[int],
        admitted: list[NewSequence],
        chunk: tuple[NewSequence, int] | None = None,
    ) -> float:
        """Decode one token of each of `decodes`, and `chunk` tokens of a prompt beside them.
        Returns the seconds it took."""
        plan = self._plan(decodes, admitted, chunk)
        started = time.perf_counter()
        self._executor.submit(plan).wait()
        return time.perf_counter() - started

    def overlapped(self, decodes: list[int], steps: int) -> list[float]:
        """Decode steps, each submitted before the one before is waited for. Returns the seconds
        from one result to the next."""
        under_way = self._executor.submit(self._plan(decodes, []))
        results = []
        for _ in range(steps):
            following = self._executor.submit(self._plan(decodes, []))
            under_way.wait()
            results.append(time.perf_counter())
            under_way = following
        under_way.wait()
        results.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(results)]

    def _plan(
        self,
        decodes: list[int],
        admitted: list[NewSequence],
        chunk: tuple[NewSequence, int] | None = None,
    ) -> StepPlan:
        rows = [self._row(seq_id, 1, True) for seq_id in decodes]
        if chunk is not None:
            new, count = chunk
            ends = self._computed[new.seq_id] + count == len(new.token_ids)
            rows.append(self._row(new.seq_id, count, ends))
        tokens = sum(row.count for row in rows)
        plan = StepPlan(
            self._step, rows, admitted, self._released, len(decodes), tokens, self._budget
        )
        self._released = []
        self._step += 1
        return plan

    def _row(self, seq_id: int, count: int, samples: bool) -> Row:
        start = self._computed[seq_id]
        held = self._blocks[seq_id]
        missing = blocks_for(start + count, self._executor.info.block_size) - len(held)
        new_blocks = [self._free.pop() for _ in range(missing)]
        held += new_blocks
        self._computed[seq_id] = start + count
        return Row(seq_id, start, count, samples, new_blocks)


def bench_decode_steps(
    config: WorkerConfig, suite: StepSuite, label: str, bandwidth: float
) -> Iterator[Measurement]:
    """Step times by batch size, beside the time of reading weights and cache once at `bandwidth`
    GB/s. label: what about the executor is being compared."""
    executor = LocalExecutor(config)
    info = executor.info
    for batch in suite.decode_batches:
        decoding = Decoding(executor, config.max_num_batched_tokens)
        seqs = [decoding.prefill(suite.context) for _ in range(batch)]
        seconds = [decoding.step(seqs, []) for _ in range(_WARMUP_STEPS + suite.steps)]
        read = info.weight_bytes + batch * suite.context * info.kv_bytes_per_token
        floor = read / bandwidth / 1e6 if bandwidth else 0.0
        median = statistics.median(seconds[_WARMUP_STEPS:]) * 1e3
        group = f"decode step, {batch} x {suite.context}"
        yield Measurement(group, label, median, "ms", floor)
        gaps = decoding.overlapped(seqs, suite.steps)
        ahead = statistics.median(gaps) * 1e3
        yield Measurement(group, f"{label}, the next one submitted", ahead, "ms", floor)
        for seq_id in seqs:
            decoding.release(seq_id)
        # Carries the releases; the next batch counts its ids anew.
        decoding.step([], [])
    executor.close()


def bench_long_prompts(config: WorkerConfig, suite: StepSuite) -> Iterator[Measurement]:
    """Time between tokens of running sequences while long prompts come in: whole, then chunked."""
    executor = LocalExecutor(config)
    for label, budget in (("whole prompts", suite.prompt), ("chunks", suite.chunk_budget)):
        decoding = Decoding(executor, config.max_num_batched_tokens)
        gaps, first_tokens = _serve_prompts(decoding, suite, budget)
        group = f"{suite.running} running, prompts of {suite.prompt}"
        yield Measurement(group, f"{label}: TPOT", statistics.mean(gaps) * 1e3, "ms")
        for name, share in (("ITL p50", 0.5), ("ITL p99", 0.99), ("ITL max", 1.0)):
            yield Measurement(group, f"{label}: {name}", percentile(gaps, share) * 1e3, "ms")
        median = statistics.median(first_tokens) * 1e3
        yield Measurement(group, f"{label}: TTFT of a prompt", median, "ms")
    executor.close()


def _serve_prompts(
    decoding: Decoding, suite: StepSuite, budget: int
) -> tuple[list[float], list[float]]:
    """(seconds between tokens of the running sequences, seconds to each prompt's first token)."""
    running = [decoding.prefill(suite.context) for _ in range(suite.running)]
    for _ in range(_WARMUP_STEPS):
        decoding.step(running, [])
    gaps: list[float] = []
    first_tokens: list[float] = []
    for _ in range(suite.prompts):
        gaps += [decoding.step(running, []) for _ in range(suite.gap)]
        new = decoding.admit(suite.prompt)
        admitted, waited = [new], 0.0
        while decoding.computed(new.seq_id) < suite.prompt:
            left = suite.prompt - decoding.computed(new.seq_id)
            # Decodes come out of the budget first. A whole prompt is let in beside them.
            count = left if budget >= suite.prompt else min(left, budget - len(running))
            gaps.append(decoding.step(running, admitted, (new, count)))
            waited += gaps[-1]
            admitted = []
        first_tokens.append(waited)
        decoding.release(new.seq_id)
    for seq_id in running:
        decoding.release(seq_id)
    decoding.step([], [])
    return gaps, first_tokens
