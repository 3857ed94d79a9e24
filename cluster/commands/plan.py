"""`headway plan`: how many engines, which budget and batch size keep the objectives."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from cluster.commands import common, simulate
from cluster.sim import options

if TYPE_CHECKING:
    from cluster.sim.planner import Candidate


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="find the engines, budget and batch size for an objective",
        description="Simulate candidates and name the fewest engines, with their token budget and "
        "max_num_seqs, that keep the objectives for this workload.",
    )
    parser.add_argument(
        "--slo",
        default="ttft=1s,itl=25ms",
        metavar="LIMITS",
        help="objectives: ttft=, tpot=, itl= (default: %(default)s)",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=99.0,
        metavar="PERCENT",
        help="requests that must keep them (default: %(default)s)",
    )
    parser.add_argument(
        "--max-engines", type=int, default=8, metavar="N", help="most to try (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options.add_workload_options(parser)
    options.add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the objectives can be kept, 1 when not with that many engines."""
    from cluster.sim.planner import Planner

    experiment = options.experiment_of(args)
    tried = 0
    with simulate.progress_bar("candidates", None) as advance:

        def tell(_candidate: Candidate) -> None:
            nonlocal tried
            tried += 1
            advance(tried)

        plan = Planner(experiment, args.max_engines, args.share, tell).search()
    ordered = sorted(plan.candidates, key=lambda c: (c.engines, c.budget, c.max_num_seqs))
    if args.json:
        found = {
            "reached": plan.reached,
            "best": _as_json(plan.best),
            "candidates": [_as_json(c) for c in ordered],
        }
        print(json.dumps(found))
    else:
        table = simulate.new_table(
            "engines", "budget", "seqs", "met %", "goodput/s", "TTFT P99", "ITL P99", "tok/s", ""
        )
        for candidate in ordered:
            table.add_row(*_row(candidate), "<- best" if candidate is plan.best else "")
        facts = simulate.describe(args, experiment)
        head = (
            f"{facts['workload']} on {facts['hardware']}, {facts['model']}: {facts['objectives']}"
        )
        simulate.print_table(head, table)
        print(_verdict(plan.best, plan.reached, args))
    return common.EXIT_OK if plan.reached else common.EXIT_SERVER


def _verdict(best: Candidate, reached: bool, args: argparse.Namespace) -> str:
    """Options of `headway serve` and `headway deploy`, and what they reach."""
    summary = best.summary
    setting = (
        f"--engines {best.engines} --max-num-batched-tokens {best.budget} "
        f"--max-num-seqs {best.max_num_seqs}"
    )
    if reached:
        return f"{setting}: {summary.slo_met_percent:.2f}% of requests within the objectives"
    return (
        f"not reached with {args.max_engines} engines: at best {summary.slo_met_percent:.2f}% "
        f"of the {args.share:g}% wanted, with {setting}"
    )


def _row(candidate: Candidate) -> list[str]:
    summary = candidate.summary
    return [
        str(candidate.engines),
        str(candidate.budget),
        str(candidate.max_num_seqs),
        f"{summary.slo_met_percent:.2f}",
        f"{summary.goodput_rps:.2f}",
        f"{summary.ttft_p99_ms:.0f}",
        f"{summary.itl_p99_ms:.1f}",
        f"{summary.tok_s:.0f}",
    ]


def _as_json(candidate: Candidate) -> dict[str, Any]:
    return dataclasses.asdict(candidate)
