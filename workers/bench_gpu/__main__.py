"""`python -m workers.bench_gpu`, or `make bench-gpu`. Exit status 2 where there is no GPU."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from workers.bench_gpu.kernels import bench_kernels
from workers.bench_gpu.measures import Measurement
from workers.bench_gpu.randommodel import write_random_model
from workers.bench_gpu.report import device_name, table, write_json
from workers.bench_gpu.steps import bench_decode_steps, bench_long_prompts
from workers.bench_gpu.suites import Suite, card_suite, dry_suite

_NO_GPU = 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.bench_gpu", description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of the 8B-shaped model (32)")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument(
        "--scratch", type=Path, help="where the random model is put for the time being (16 GB)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the CPU: does it run?"
    )
    return parser


def measure(suite: Suite, folder: Path) -> Iterator[Measurement]:
    """Everything, as it becomes known. folder: empty, for the random model."""
    bandwidth = 0.0
    with torch.inference_mode():
        for result in bench_kernels(suite.kernels):
            if result.case == "device copy":
                bandwidth = result.value
            yield result
    write_random_model(folder, suite.model, suite.dtype)
    for label, changes in suite.executors.items():
        config = suite.config(str(folder), changes)
        yield from bench_decode_steps(config, suite.steps, label, bandwidth)
    yield from bench_long_prompts(suite.config(str(folder), {}), suite.steps)


def check_room(scratch: Path, suite: Suite) -> str | None:
    """Why the model does not fit there, or None."""
    needed = suite.model.parameters * suite.dtype.itemsize
    free = shutil.disk_usage(scratch).free
    if needed > free:
        return f"the model takes {needed >> 20} MiB, {scratch} has {free >> 20} free: see --scratch"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    if not args.dry_run and not torch.cuda.is_available():
        print("bench-gpu: torch finds no usable GPU here; --dry-run runs it on the CPU")
        return _NO_GPU
    suite = dry_suite() if args.dry_run else card_suite(args.layers)
    scratch = args.scratch or Path(tempfile.gettempdir())
    problem = check_room(scratch, suite)
    if problem:
        print(f"bench-gpu: {problem}")
        return 1
    torch.manual_seed(0)
    print(f"torch {torch.__version__} on {device_name(suite.device)}", flush=True)
    results: list[Measurement] = []
    with tempfile.TemporaryDirectory(dir=scratch, prefix="headway-bench-") as folder:
        for result in measure(suite, Path(folder)):
            results.append(result)
            print(f"  {result.group}: {result.case}: {result.value:.4g} {result.unit}", flush=True)
    print(f"\n{table(results)}")
    if args.json:
        write_json(args.json, suite.device, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
