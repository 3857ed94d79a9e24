"""Ratios of the CPU kernels and of a whole decode step: `python -m workers.bench_cpu`.

Absolute times of a shared machine mean little. What is compared is therefore run in turns,
round after round, and reported as the ratio of the fastest runs and the median of the rounds'
ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from cluster.core.config import WorkerConfig
from cluster.core.plan import NewSequence, Row, StepPlan
from cluster.core.sampling import SamplingParams
from workers.attention.backend import AttentionSpec, LayerCache
from workers.attention.meta import StepMeta
from workers.attention.registry import BACKENDS
from workers.cachedir import default_cache_dir
from workers.executor import LocalExecutor
from workers.native.levels import usable_levels
from workers.pull import MODEL_NAME

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`sequences` of `count` new tokens each, after `context` tokens in the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    count: int
    context: int

    def __str__(self) -> str:
        kind = "decode" if self.count == 1 else f"chunk of {self.count}"
        shape = f"{self.heads}/{self.kv_heads} x {self.head_dim}"
        return f"{kind}, {self.sequences} x {self.context}, heads {shape}"


CASES = (
    AttentionCase(9, 3, 64, 16, 1, 512),
    AttentionCase(8, 4, 64, 32, 1, 512),
    AttentionCase(32, 8, 128, 8, 1, 1024),
    AttentionCase(9, 3, 64, 1, 256, 0),
    AttentionCase(8, 4, 64, 1, 512, 1024),
    AttentionCase(32, 8, 128, 1, 256, 1024),
)
STEP_BATCH, STEP_CONTEXT = 16, 512


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way against another over the same rounds.

    fastest_us: of each way. ratio: first way over second, of the fastest runs; median_ratio: of the
    rounds' ratios. target: what the ratio should be at most, 0 for none.
    """

    case: str
    dtype: str
    ways: tuple[str, str]
    fastest_us: tuple[float, float]
    ratio: float
    median_ratio: float
    target: float


def compare(
    case: str, dtype: str, times: dict[str, list[float]], ways: tuple[str, str], target: float
) -> Comparison:
    """times: way -> microseconds per round."""
    first, second = times[ways[0]], times[ways[1]]
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return Comparison(
        case,
        dtype,
        ways,
        (min(first), min(second)),
        min(first) / min(second),
        statistics.median(ratios),
        target,
    )


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of every way in every round; a first round is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            if turn:
                times[name].append((time.perf_counter() - started) * 1e6)
    return times


# -- attention alone ---------------------------------------------------------------------------


def bench_attention(case: AttentionCase, dtype: str, rounds: int) -> list[Comparison]:
    """Native against gather + SDPA, and for decodes against reading as many bytes once."""
    query, cache, meta = _attention_inputs(case, DTYPES[dtype])
    out = torch.empty_like(query)
    spec = AttentionSpec(
        case.heads,
        case.kv_heads,
        case.head_dim,
        BLOCK_SIZE,
        case.head_dim**-0.5,
        DTYPES[dtype],
        torch.device("cpu"),
    )
    backends = {name: BACKENDS[name](spec) for name in ("native", "torch")}
    ways: dict[str, Callable[[], object]] = {}
    for name, backend in backends.items():
        backend.plan(meta)
        ways[name] = partial(backend.run, query, cache, out)
    ways["read"] = _reader(cache.keys.nbytes + cache.values.nbytes)
    times = take_turns(ways, rounds)
    decode = case.count == 1
    results = [compare(str(case), dtype, times, ("native", "torch"), 0.5 if decode else 0.75)]
    if decode:
        results.append(compare(str(case), dtype, times, ("native", "read"), 2.0))
    return results


def _attention_inputs(
    case: AttentionCase, dtype: torch.dtype
) -> tuple[torch.Tensor, LayerCache, StepMeta]:
    """Random queries and pages, the pages of a sequence scattered over the cache."""
    length = case.context + case.count
    blocks = -(-length // BLOCK_SIZE)
    order = torch.randperm(case.sequences * blocks) + 1
    pages = (len(order) + 1, BLOCK_SIZE, case.kv_heads, case.head_dim)
    cache = LayerCache(torch.randn(pages).to(dtype), torch.randn(pages).to(dtype))
    total = case.sequences * case.count
    ends = torch.arange(0, total + 1, case.count, dtype=torch.int32)
    meta = StepMeta(
        num_seqs=case.sequences,
        num_tokens=total,
        num_decodes=case.sequences if case.count == 1 else 0,
        max_q=case.count,
        max_k=length,
        cu_seqlens_q=ends,
        seqused_k=torch.full((case.sequences,), length, dtype=torch.int32),
        block_table=order.view(case.sequences, blocks).to(torch.int32),
        slot_mapping=torch.full((total,), -1, dtype=torch.int32),
        positions=torch.zeros(total, dtype=torch.int32),
        logits_index=ends[1:] - 1,
    )
    return torch.randn(total, case.heads, case.head_dim).to(dtype), cache, meta


def _reader(num_bytes: int) -> Callable[[], object]:
    """Read memory of this size once, at whatever speed one thread of torch does it."""
    memory = torch.ones(num_bytes // 4)
    return memory.sum


# -- a whole step ------------------------------------------------------------------------------


class DecodeBatch:
    """STEP_BATCH sequences of STEP_CONTEXT tokens on an executor of its own, decoding."""

    def __init__(self, model: Path, dtype: str, backend: str, steps: int) -> None:
        length = STEP_CONTEXT + steps + 1
        blocks = -(-length // BLOCK_SIZE)
        self._executor = LocalExecutor(
            WorkerConfig(
                str(model),
                dtype=dtype,
                device="cpu",
                attention_backend=backend,
                block_size=BLOCK_SIZE,
                num_blocks=STEP_BATCH * blocks,
                max_num_batched_tokens=STEP_CONTEXT,
                max_num_seqs=STEP_BATCH,
                threads=torch.get_num_threads(),
            )
        )
        self._computed = STEP_CONTEXT
        sampling = SamplingParams(max_tokens=steps + 1, temperature=0.0)
        for number in range(STEP_BATCH):
            tokens = [(7 * number + 13 * i) % 1000 for i in range(STEP_CONTEXT)]
            own = list(range(number * blocks + 1, (number + 1) * blocks + 1))
            row = Row(number, 0, STEP_CONTEXT, True, own)
            admitted = [NewSequence(number, tokens, STEP_CONTEXT, sampling)]
            self._executor.submit(StepPlan(0, [row], admitted, [], 0, STEP_CONTEXT)).wait()

    @property
    def bytes_per_step(self) -> int:
        """What a step must read at least: the weights and the cached context."""
        info = self._executor.info
        return info.weight_bytes + STEP_BATCH * self._computed * info.kv_bytes_per_token

    def step(self) -> None:
        rows = [Row(number, self._computed, 1, True, []) for number in range(STEP_BATCH)]
        plan = StepPlan(1, rows, [], [], STEP_BATCH, STEP_BATCH)
        self._executor.submit(plan).wait()
        self._computed += 1


def bench_step(model: Path, dtype: str, rounds: int) -> list[Comparison]:
    """A decode step on native kernels, on torch's, and reading its bytes once."""
    batches = {n: DecodeBatch(model, dtype, n, rounds + 1) for n in ("native", "torch")}
    ways: dict[str, Callable[[], object]] = {n: batch.step for n, batch in batches.items()}
    ways["read"] = _reader(batches["native"].bytes_per_step)
    times = take_turns(ways, rounds)
    case = f"decode step of {model.name}, {STEP_BATCH} x {STEP_CONTEXT}"
    return [
        compare(case, dtype, times, ("native", "torch"), 0.0),
        compare(case, dtype, times, ("native", "read"), 1.8),
    ]


# -- the command -------------------------------------------------------------------------------


def print_table(results: list[Comparison]) -> None:
    print(f"{'case':<52} {'dtype':<9} {'ways':<13} {'fastest us':>17} {'ratio':>6} {'median':>7}")
    for r in results:
        times = f"{r.fastest_us[0]:.0f} / {r.fastest_us[1]:.0f}"
        target = f"  target <= {r.target:g}" if r.target else ""
        print(
            f"{r.case:<52} {r.dtype:<9} {'/'.join(r.ways):<13} {times:>17} "
            f"{r.ratio:>6.2f} {r.median_ratio:>7.2f}{target}"
        )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.bench_cpu", description=__doc__)
    default = default_cache_dir() / "models" / MODEL_NAME
    parser.add_argument("--model", type=Path, default=default, help="folder for the decode step")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=15, help="turns per comparison")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--json", type=Path, help="also write the results there")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results: list[Comparison] = []
    with torch.inference_mode():
        for dtype in args.dtype or DTYPES:
            for case in CASES:
                results += bench_attention(case, dtype, args.rounds)
            if args.model.is_dir():
                results += bench_step(args.model, dtype, args.rounds)
    print(f"torch {torch.__version__}, {args.threads} thread(s), level {usable_levels()[0].name}")
    print_table(results)
    if not args.model.is_dir():
        print(f"no model at {args.model}: no decode step measured (fetch one: headway pull)")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
