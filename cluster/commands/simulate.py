"""`headway simulate`: the scheduler that serves, in virtual time, on any traffic and machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cluster.commands import common
from cluster.core.errors import ConfigError
from cluster.sim import options

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.sim.article import ArticleTable
    from cluster.sim.experiment import Experiment
    from cluster.sim.metrics import Meter, Summary
    from cluster.sim.simulation import Observer

Advance: TypeAlias = Callable[[int], None]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="run a workload on simulated engines",
        description="Run a workload through the real scheduler and engine code in virtual time, "
        "with a cost model where the accelerator would be.",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--sweep", metavar="NAME=V,V,...", help="vary budget, max_num_seqs, engines, policy, ..."
    )
    mode.add_argument(
        "--article", action="store_true", help="the articles' five-policy table beside ours"
    )
    mode.add_argument(
        "--azure", action="store_true", help="the Azure traces under two policies (two minutes)"
    )
    mode.add_argument(
        "--bench", action="store_true", help="measure the simulator: engine steps per second"
    )
    parser.add_argument(
        "--slo",
        default="ttft=1s,tpot=25ms",
        metavar="LIMITS",
        help="objectives for goodput: ttft=, tpot=, itl= (default: %(default)s)",
    )
    options.add_workload_options(parser)
    options.add_engine_options(parser)
    parser.add_argument(
        "--check", action="store_true", help="check the scheduler's books after every step (slow)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--html", type=Path, metavar="FILE", help="also write a report with plots")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when the simulation is done; bad input raises ConfigError."""
    try:
        return _run_mode(args)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return common.EXIT_OK


def _run_mode(args: argparse.Namespace) -> int:
    if args.html is not None and (args.article or args.azure or args.bench):
        raise ConfigError("--html goes with a single simulation or with --sweep")
    if args.html is not None and not args.html.parent.is_dir():
        # Now, and not after an hour of simulating.
        raise ConfigError(f"--html: {args.html.parent} is not a folder")
    if args.article:
        return _article(args)
    if args.azure:
        return _azure(args)
    if args.bench:
        return _bench(args)
    return _sweep(args) if args.sweep is not None else _single(args)


# -- modes ---------------------------------------------------------------------------------------


def _single(args: argparse.Namespace) -> int:
    from cluster.sim.checks import CheckedSteps
    from cluster.sim.html import report_html
    from cluster.sim.metrics import Meter, summary_rows
    from cluster.sim.recorder import Recorder

    experiment = options.experiment_of(args)
    meter = Meter(experiment.objectives)
    recorder = None if args.html is None else Recorder()
    observer = CheckedSteps(recorder) if args.check else recorder
    summary = _run(experiment, "simulating", meter, observer)
    facts = describe(args, experiment)
    if recorder is not None:
        _write(args.html, report_html("Headway simulation", facts, summary, meter, recorder))
    skipped = _skipped(experiment)
    if args.json:
        _print_json(
            {"configuration": facts, "summary": dataclasses.asdict(summary), "skipped": skipped}
        )
    else:
        table = new_table("", "value")
        for label, value in summary_rows(summary):
            table.add_row(label, value)
        print_table(", ".join(f"{k} {v}" for k, v in facts.items()), table)
        for line in skipped[:5]:
            print(f"skipped: {line}", file=sys.stderr)
        if skipped:
            print(f"{len(skipped)} rows skipped", file=sys.stderr)
    return common.EXIT_OK


def _sweep(args: argparse.Namespace) -> int:
    from cluster.sim.experiment import parse_sweep, vary
    from cluster.sim.html import sweep_html

    experiment = options.experiment_of(args)
    name, values = parse_sweep(args.sweep)
    # All of them first: a bad last value must not cost the runs before it.
    varied = [(value, vary(experiment, name, value)) for value in values]
    rows = [(v, _run(e, f"{name} {v}")) for v, e in varied]
    if args.html is not None:
        _write(args.html, sweep_html(f"Headway: {name}", name, rows))
    if args.json:
        found = [{"value": v, **dataclasses.asdict(s)} for v, s in rows]
        _print_json({"configuration": describe(args, experiment), "sweep": name, "rows": found})
        return common.EXIT_OK
    table = new_table(name, *(label for label, _ in SWEEP_COLUMNS))
    for value, summary in rows:
        table.add_row(str(value), *(f"{getattr(summary, c):.2f}" for _, c in SWEEP_COLUMNS))
    print_table(", ".join(f"{k} {v}" for k, v in describe(args, experiment).items()), table)
    return common.EXIT_OK


SWEEP_COLUMNS = (
    ("tok/s", "tok_s"),
    ("TTFT P50", "ttft_p50_ms"),
    ("P99", "ttft_p99_ms"),
    ("TPOT P99", "tpot_p99_ms"),
    ("ITL P99", "itl_p99_ms"),
    ("gap", "max_gap_ms"),
    ("met %", "slo_met_percent"),
    ("goodput/s", "goodput_rps"),
)
"""Milliseconds where no unit is named."""


def _article(args: argparse.Namespace) -> int:
    from cluster.sim.article import run_article

    with progress_bar("article", 5, show=not args.json) as advance:
        done = 0

        def started(_policy: str) -> None:
            nonlocal done
            advance(done)
            done += 1

        result = run_article(started)
    if args.json:
        _print_json(result.as_json())
    else:
        print_table(
            "H100, Llama-3-8B, 160 requests at 6/s: the article's figure, then ours",
            article_table(result),
        )
    return common.EXIT_OK


def article_table(result: ArticleTable) -> Table:
    """Two lines per policy."""
    from cluster.sim.article import COLUMNS, GOLDEN

    table = new_table("policy", *(c.replace("_", " ").replace(" ms", "") for c in COLUMNS))
    for policy in result.ours:
        golden = GOLDEN[policy]
        theirs = [f"{golden[c]:.3f}" if c in golden else "-" for c in COLUMNS]
        table.add_row(policy, *theirs, style="dim")
        table.add_row("  ours", *(f"{result.cell(policy, c):.3f}" for c in COLUMNS))
    return table


def _azure(args: argparse.Namespace) -> int:
    from cluster.sim.azure import GOLDEN, REQUESTS, AzureCase, cells, run_azure

    with progress_bar("azure", REQUESTS * len(GOLDEN)) as advance:
        order = list(GOLDEN)

        def started(case: AzureCase) -> Advance:
            base = order.index(case) * REQUESTS
            return lambda finished: advance(base + finished)

        rows = [(case, cells(summary)) for case, summary in run_azure(started)]
    if args.json:
        _print_json(
            {
                "rows": [
                    {**case._asdict(), **ours._asdict(), "reference": GOLDEN[case]._asdict()}
                    for case, ours in rows
                ]
            }
        )
        return common.EXIT_OK
    table = new_table("trace", "x", "policy", "ITL P99", "ours", "gap", "ours", "TTFT P99", "ours")
    for case, ours in rows:
        pairs = zip(GOLDEN[case], ours, strict=True)
        shown = [text for a, b in pairs for text in (f"{a:.0f}", f"{b:.1f}")]
        table.add_row(case.trace, f"{case.rate_scale:g}", case.policy, *shown)
    print_table("First 8,000 requests, one H100, Llama-3-8B; milliseconds", table)
    return common.EXIT_OK


def _bench(args: argparse.Namespace) -> int:
    from cluster.sim.bench import run_bench

    result = run_bench()
    if args.json:
        _print_json({**dataclasses.asdict(result), "steps_per_s": result.steps_per_s})
    else:
        print(
            f"azure-conv, {result.steps} engine steps of {result.rows:.1f} sequences in "
            f"{result.process_s:.2f} s of one core: {result.steps_per_s:,.0f} steps/s, "
            f"{result.tokens_per_s:,.0f} tokens/s"
        )
    return common.EXIT_OK


# -- shared with `headway plan` ------------------------------------------------------------------


def describe(args: argparse.Namespace, experiment: Experiment) -> dict[str, str]:
    """What is simulated, in words."""
    from cluster.sim.quantities import describe_objectives

    setup = experiment.setup
    return {
        "workload": args.workload,
        "policy": setup.policies.batching,
        "budget": "itl" if setup.policies.budget == "itl" else str(setup.budget),
        "max_num_seqs": str(setup.max_num_seqs),
        "kv_tokens": str(setup.kv_tokens),
        "engines": str(experiment.engines),
        "hardware": f"{args.tensor_parallel} x {args.hardware}",
        "model": args.model,
        "objectives": describe_objectives(experiment.objectives),
    }


@contextmanager
def progress_bar(title: str, total: int | None, *, show: bool = True) -> Iterator[Advance]:
    """A bar on stderr; nothing where nobody watches. What it yields is told the work done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (show and console.is_terminal)
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


def _run(
    experiment: Experiment,
    title: str,
    meter: Meter | None = None,
    observer: Observer | None = None,
) -> Summary:
    with progress_bar(title, options.expected_requests(experiment.workload)) as advance:
        return experiment.run(advance, observer, meter=meter)


def _skipped(experiment: Experiment) -> list[str]:
    from cluster.sim.traces import Trace

    workload = experiment.workload
    return workload.skipped if isinstance(workload, Trace) else []


def new_table(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(head: str, table: Table) -> None:
    from rich.console import Console

    console = Console()
    # Piped into a file nothing may be cut off at 80 columns.
    if not console.is_terminal:
        console = Console(width=160)
    console.print(head, highlight=False)
    console.print(table)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {error}") from None
