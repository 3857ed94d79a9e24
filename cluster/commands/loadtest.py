"""`headway loadtest`: a load with known arrivals on running servers, judged and compared."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.common import DEFAULT_ADDRESS
from cluster.core.errors import ConfigError

if TYPE_CHECKING:
    from loadtests.job import Job
    from loadtests.outcome import Outcome


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "loadtest",
        help="measure a running server under load",
        description="Send a schedule open-loop and measure TTFT, TPOT and the gaps between tokens.",
    )
    modes = parser.add_subparsers(title="modes", required=True, metavar="MODE")
    run_parser = modes.add_parser(
        "run",
        help="send a load (exit code 0 objectives met, 3 missed, 4 the run is invalid)",
    )
    run_parser.add_argument("--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT")
    run_parser.add_argument(
        "--children", type=int, default=1, help="client processes (one does about 8,000 tokens/s)"
    )
    run_parser.set_defaults(run=run)
    quick_parser = modes.add_parser(
        "quick",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="serve the embedded model and replay the Azure conversation trace, scaled to this "
        "machine",
    )
    quick_parser.add_argument("--requests", type=int, default=200, help="of the trace")
    quick_parser.add_argument("--slo", default="embedded-cpu", help="objectives by name")
    quick_parser.add_argument("--out", default="loadtest-results", help="folder for the results")
    quick_parser.add_argument(
        "--serve", default="", metavar="OPTIONS", help="further options of `headway serve`"
    )
    quick_parser.set_defaults(run=run_quick)
    check_parser = modes.add_parser(
        "selfcheck",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="whether this machine can measure: known gaps read back at full rate",
    )
    check_parser.add_argument("--tokens-per-s", type=float, default=7500.0)
    check_parser.add_argument("--seconds", type=float, default=10.0)
    check_parser.add_argument("--children", type=int, default=1, help="client processes")
    check_parser.set_defaults(run=run_selfcheck)
    compare_parser = modes.add_parser("compare", help="two result folders side by side")
    compare_parser.add_argument("a", type=Path, metavar="A")
    compare_parser.add_argument("b", type=Path, metavar="B")
    compare_parser.set_defaults(run=run_compare)
    beside_parser = modes.add_parser(
        "beside",
        help="several servers under one schedule, in turns (exit code: the worst of the runs')",
    )
    beside_parser.add_argument(
        "servers",
        nargs="+",
        metavar="NAME=ADDRESS",
        help="HOST:PORT of Headway, or http://HOST:PORT#MODEL of a server with OpenAI's protocol",
    )
    beside_parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: 3)")
    beside_parser.set_defaults(run=run_beside)
    if load_extra_missing():
        return
    from loadtests.options import add_load_options, add_protocol_option

    add_load_options(run_parser)
    add_protocol_option(run_parser)
    add_load_options(beside_parser)


def load_extra_missing() -> bool:
    """Whether the packages of the extra `load` are absent."""
    return importlib.util.find_spec("hdrh") is None or importlib.util.find_spec("loadtests") is None


def require_load_extra() -> None:
    if load_extra_missing():
        raise ConfigError("load tests need the extra: pip install 'headway-serving[load]'")


def run(args: argparse.Namespace) -> int:
    """The verdict's exit code."""
    require_load_extra()
    from loadtests.objectives import load_objectives
    from loadtests.options import job_of, limits_of
    from loadtests.outcome import judge
    from loadtests.report import result_folder
    from loadtests.runner import run_load

    if args.children < 1:
        raise ConfigError(f"--children must be at least 1, got {args.children}")
    # Before an hour of load, not after it.
    load_objectives(args.slo)
    job, folder = job_of(args, args.address, args.target), result_folder(args.out)
    results = run_load(job, args.children, _progress if sys.stderr.isatty() else None)
    outcome = judge(job, results, args.slo, limits_of(args))
    return _finish(outcome, folder)


def run_quick(args: argparse.Namespace) -> int:
    """The verdict's exit code."""
    require_load_extra()
    from cluster.bench import quick
    from cluster.bench.served import Served
    from loadtests.objectives import load_objectives
    from loadtests.report import result_folder
    from loadtests.targets.base import TargetSpec

    load_objectives(args.slo)
    if args.requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {args.requests}")
    folder = result_folder(args.out)
    print("starting headway serve", flush=True)
    with Served(args.serve.split()) as served:
        target = TargetSpec(address=served.address)
        outcome = quick.run_quick(target, args.requests, args.slo, print)
    return _finish(outcome, folder)


def run_selfcheck(args: argparse.Namespace) -> int:
    """0 when everything was read back, 4 when not."""
    require_load_extra()
    from loadtests.selfcheck import SelfCheck

    check = SelfCheck(args.tokens_per_s, seconds=args.seconds, children=args.children)
    results = check.run()
    checks = check.checks(results)
    for item in checks:
        print(item.line())
    return 0 if all(item.passed for item in checks) else 4


def run_compare(args: argparse.Namespace) -> int:
    require_load_extra()
    from loadtests.compare import Run, compare_lines

    print("\n".join(compare_lines(Run.read(args.a), Run.read(args.b))))
    return 0


def run_beside(args: argparse.Namespace) -> int:
    """The worst of the runs' exit codes; 130 when interrupted, after what was measured by then."""
    require_load_extra()
    from loadtests.beside import (
        Turn,
        beside_lines,
        check_rivals,
        exit_code_of,
        parse_rival,
        standings_of,
        take_turns,
    )
    from loadtests.objectives import load_objectives
    from loadtests.options import job_of, limits_of
    from loadtests.outcome import VERDICTS, judge
    from loadtests.report import result_folder
    from loadtests.runner import run_load

    load_objectives(args.slo)
    job = job_of(args, "", "headway")
    rivals = [parse_rival(text, job.target) for text in args.servers]
    check_rivals(rivals, args.rounds)
    folder = result_folder(args.out)

    def measure(turn: Job) -> Outcome:
        return judge(turn, run_load(turn), args.slo, limits_of(args))

    turns: list[Turn] = []
    interrupted = False
    try:
        for turn in take_turns(job, rivals, args.rounds, folder, measure):
            turns.append(turn)
            verdict = "nothing was measured" if turn.run is None else VERDICTS[turn.exit_code]
            print(f"round {turn.number + 1} of {args.rounds}, {turn.rival.name}: {verdict}")
            print("".join(f"  {problem}\n" for problem in turn.problems), end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; of the runs that ended:")
    print("\n".join(beside_lines(standings_of(turns))))
    print(f"a report of each run is in {folder}/NAME/ROUND")
    return 130 if interrupted else exit_code_of(turns)


def _finish(outcome: Outcome, folder: Path) -> int:
    from loadtests.report import write_outcome

    write_outcome(outcome, folder)
    print("\n".join(outcome.lines()))
    print(f"report: {folder / 'report.html'}")
    return outcome.exit_code


def _progress(results: Any) -> None:
    counts = results.counts
    done = counts.finished + counts.failed
    print(f"\r{done} of {counts.scheduled} requests", end="", file=sys.stderr, flush=True)
