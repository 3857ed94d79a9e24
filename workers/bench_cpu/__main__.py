"""`python -m workers.bench_cpu`, or `make bench-cpu`: what the CPU path takes, as ratios.

Absolute times of a shared machine mean little. What is compared is therefore run in turns,
round after round, and reported as the ratio of the fastest runs and the median of the rounds'
ratios. `headway bench cpu` has the engine as a whole beside others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from workers.bench_cpu.attention import CASES, AttentionCase, bench_attention
from workers.bench_cpu.collectives import bench_collectives
from workers.bench_cpu.steps import StepCase, bench_long_prompt, bench_memory, bench_steps
from workers.bench_cpu.turns import DTYPES, Comparison
from workers.cachedir import default_cache_dir
from workers.native.levels import usable_levels
from workers.pull import MODEL_NAME


@dataclass(frozen=True, slots=True)
class Suite:
    """What is measured."""

    attention: Sequence[AttentionCase] = CASES
    steps: StepCase = field(default_factory=StepCase)


def measure(suite: Suite, args: argparse.Namespace) -> Iterator[Comparison]:
    """Everything, as it becomes known."""
    for dtype in args.dtype or DTYPES:
        with torch.inference_mode():
            for case in suite.attention:
                yield from bench_attention(case, dtype, args.rounds)
            if args.model.is_dir():
                yield from bench_steps(args.model, dtype, suite.steps, args.rounds)
                yield from bench_long_prompt(args.model, dtype, suite.steps)
                yield from bench_memory(args.model, dtype, suite.steps)
            yield from bench_collectives(dtype, args.rounds)


HEAD = f"{'case':<52} {'dtype':<9} {'ways':<15} {'best':>21} {'ratio':>6} {'median':>7}"


def line(r: Comparison) -> str:
    best = f"{r.best[0]:.0f} / {r.best[1]:.0f} {r.unit}"
    target = f"  target <= {r.target:g}" if r.target else ""
    return (
        f"{r.case:<52} {r.dtype:<9} {'/'.join(r.ways):<15} {best:>21} "
        f"{r.ratio:>6.2f} {r.median_ratio:>7.2f}{target}"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.bench_cpu", description=__doc__)
    default = default_cache_dir() / "models" / MODEL_NAME
    parser.add_argument("--model", type=Path, default=default, help="folder for the steps")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=15, help="turns per comparison")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--json", type=Path, help="also write the results there")
    return parser


def main(arguments: Sequence[str], suite: Suite) -> None:
    args = build_parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.threads} thread(s), level {usable_levels()[0].name}")
    print(HEAD)
    results: list[Comparison] = []
    for result in measure(suite, args):
        print(line(result), flush=True)
        results.append(result)
    if not args.model.is_dir():
        print(f"no model at {args.model}: no step measured (fetch one: headway pull)")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:], Suite())
