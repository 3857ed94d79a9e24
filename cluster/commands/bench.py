"""`headway bench`: experiments on this machine, each with a table and a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.commands.loadtest import require_load_extra
from cluster.core.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from cluster.bench.experiments import Experiment, Row, Variant
    from cluster.bench.metrics import Bench

POLICIES = ("static", "dynamic", "continuous", "fused", "chunked", "controller")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure policies and the scheduler on this machine",
        description="Experiments that start what they need, print a table and write a report.",
    )
    modes = parser.add_subparsers(title="experiments", required=True, metavar="EXPERIMENT")
    _add_hol(modes)
    _add_goodput(modes)
    _add_kv(modes)
    scheduler = modes.add_parser("scheduler", help="what the scheduler alone costs per step")
    scheduler.add_argument("--steps", type=int, default=400, help="steps per case (default: 400)")
    scheduler.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PYTHON",
        help="an interpreter with vLLM in it: measure both, interleaved, and print ratios",
    )
    scheduler.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    scheduler.set_defaults(run=run_scheduler)
    fleet = modes.add_parser("fleet", help="what a router's decision costs, up to 1,000 engines")
    fleet.add_argument("--offers", type=int, default=20_000, help="requests per case")
    fleet.set_defaults(run=run_fleet)
    relief = modes.add_parser(
        "relief", help="preemption at home against cluster-wide, simulated and for real (minutes)"
    )
    relief.add_argument("--requests", type=int, default=4000, help="simulated, per case")
    relief.add_argument(
        "--live-requests", type=int, default=300, help="for real, per case and round; 0: none"
    )
    relief.add_argument("--rounds", type=int, default=1, help="of the real one, medians are shown")
    relief.set_defaults(run=run_relief)
    metrics = modes.add_parser("metrics", help="what metrics cost, with beside without")
    metrics.add_argument("--rounds", type=int, default=20, help="interleaved (default: 20)")
    metrics.set_defaults(run=run_metrics)
    _add_cpu(modes)
    promise = modes.add_parser(
        "promise", help="the learning budget against fixed ones on the Azure traces (long)"
    )
    promise.add_argument("--requests", type=int, help="rows of each trace (default: all)")
    promise.set_defaults(run=run_promise)


def _add_cpu(modes: Any) -> None:
    parser = modes.add_parser(
        "cpu",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="output tokens per second on the CPU beside other engines, in turns",
    )
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the embedded one")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--budget", type=int, default=512, help="tokens per step, of all engines")
    parser.add_argument("--threads", type=int, default=2, help="of all engines")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    parser.add_argument("--vllm-python", type=Path, help="an interpreter with vLLM for CPUs")
    parser.add_argument("--openvino-python", type=Path, help="one with openvino-genai")
    parser.add_argument("--openvino-model", type=Path, help="the model as exported for OpenVINO")
    parser.set_defaults(run=run_cpu)


def _add_hol(modes: Any) -> None:
    parser = modes.add_parser(
        "hol",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="running streams while long prompts come in, under every batching policy",
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="which ones, by commas")
    parser.add_argument("--streams", type=int, default=16, help="streams that run all the time")
    parser.add_argument("--output", type=int, default=240, help="tokens of each stream")
    parser.add_argument("--long-prompt", type=int, default=2048, help="tokens of a long prompt")
    parser.add_argument(
        "--long-every", type=float, default=0.0, help="seconds between them; 0 finds out what fits"
    )
    parser.add_argument("--long-count", type=int, default=5, help="how many come")
    parser.add_argument("--budget", type=int, default=64, help="token budget of a chunked step")
    parser.add_argument("--itl-objective", type=float, default=200.0, help="controller's goal, ms")
    _add_common(parser, "bench-hol")
    parser.set_defaults(run=run_hol)


def _add_goodput(modes: Any) -> None:
    parser = modes.add_parser(
        "goodput",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="highest rate that meets the objectives, by bisection",
    )
    parser.add_argument("--slo", default="embedded-cpu", help="objectives by name in slo.toml")
    parser.add_argument("--low", type=float, default=0.25, help="requests/s that should pass")
    parser.add_argument("--high", type=float, default=8.0, help="requests/s that should not")
    parser.add_argument("--halvings", type=int, default=4)
    parser.add_argument("--requests", type=int, default=60, help="per rate")
    parser.add_argument("--prompt-mean", type=float, default=64.0)
    parser.add_argument("--output-mean", type=float, default=32.0)
    _add_common(parser, "bench-goodput")
    parser.set_defaults(run=run_goodput)


def _add_kv(modes: Any) -> None:
    parser = modes.add_parser(
        "kv",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="long outputs on pools that are too small: recompute at home against cluster-wide",
    )
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s")
    parser.add_argument("--output-mean", type=float, default=160.0)
    parser.add_argument("--num-blocks", type=int, default=64, help="KV blocks per engine")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument(
        "--variant",
        action="append",
        metavar="NAME=OPTIONS",
        help="a way to serve: a name and options of `headway serve`, repeatable "
        "(default: no move, and up to three, of a request whose engine has run out)",
    )
    _add_common(parser, "bench-kv")
    parser.set_defaults(run=run_kv)


def _add_common(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the report")
    parser.add_argument(
        "--serve", default="", metavar="OPTIONS", help="further options of `headway serve`"
    )


def run_hol(args: argparse.Namespace) -> int:
    """0 when every variant was measured validly, 4 when not, 1 when one could not be served."""
    require_load_extra()
    from cluster.bench.experiments import Experiment, head_of_line, measure_pace, policy_variants
    from cluster.bench.served import Served
    from loadtests.report import result_folder
    from loadtests.targets.base import TargetSpec

    names = args.policies.split(",")
    whole = args.long_prompt + 64
    known = policy_variants(args.budget, whole, args.itl_objective)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"no policy {unknown[0]!r}; there are {', '.join(known)}")
    result_folder(args.out)
    shared = ("--max-num-seqs", str(args.streams + args.long_count), *_serve(args))
    first_s, every_s = 0.0, args.long_every
    if not every_s:
        with Served([*shared, *known["continuous"].options]) as served:
            target = TargetSpec(address=served.address)
            pace = measure_pace(target, args.streams, args.long_prompt)
        first_s, every_s = pace.long_prompts_s(args.output, args.long_count)
        print(
            f"a long prompt alone takes {pace.prefill_s:.2f} s, a decode step of {args.streams} "
            f"{1e3 * pace.step_s:.0f} ms: one comes after {first_s:.1f} s and then every "
            f"{every_s:.1f} s"
        )
    experiment = Experiment(
        f"{args.streams} streams and {args.long_count} prompts of {args.long_prompt} tokens",
        head_of_line(
            args.streams, args.output, args.long_prompt, every_s, args.long_count, first_s
        ),
        tuple(known[name] for name in names),
        shared_options=shared,
    )
    rows = _compare(experiment, args.out)
    _say_gain(rows)
    return _code(experiment, rows)


def run_kv(args: argparse.Namespace) -> int:
    require_load_extra()
    from cluster.bench.experiments import Experiment
    from loadtests.scenario import Scenario

    experiment = Experiment(
        f"long outputs on {args.num_blocks} KV blocks per engine, {args.engines} engine(s)",
        Scenario(
            arrivals=f"poisson:{args.rate:g}",
            requests=args.requests,
            prompt_mean=32,
            output_mean=args.output_mean,
            max_output=round(3 * args.output_mean),
        ),
        _kv_variants(args.variant),
        shared_options=(
            *("--num-blocks", str(args.num_blocks), "--engines", str(args.engines)),
            *_serve(args),
        ),
    )
    return _code(experiment, _compare(experiment, args.out))


def run_goodput(args: argparse.Namespace) -> int:
    """0 when a rate met the objectives, 3 when none did."""
    require_load_extra()
    from cluster.bench.experiments import best_rate, highest_rate
    from cluster.bench.served import Served
    from cluster.sim.html import page, scatter
    from loadtests.objectives import load_objectives
    from loadtests.report import result_folder, table
    from loadtests.scenario import Scenario
    from loadtests.targets.base import TargetSpec

    load_objectives(args.slo)
    folder = result_folder(args.out)
    base = Scenario(
        requests=args.requests, prompt_mean=args.prompt_mean, output_mean=args.output_mean
    )
    with Served(_serve(args)) as served:
        bounds = (args.low, args.high, args.halvings)
        tried = highest_rate(TargetSpec(address=served.address), base, args.slo, bounds, print)
    best = best_rate(tried)
    rows = [
        [f"{rate:.3f}", f"{o.goodput_rps:.3f}", *(f"{c.name}: {c.value}" for c in o.verdicts)]
        for rate, o in sorted(tried, key=lambda pair: pair[0])
    ]
    dots = [(rate, outcome.goodput_rps, "") for rate, outcome in tried]
    head = ("requests/s", "goodput", *("" for _ in tried[0][1].verdicts))
    plot = scatter(dots, "requests per second offered", "goodput, requests per second")
    title = f"Goodput under {args.slo}: {best:.3f} requests/s"
    (folder / "index.html").write_text(page(title, plot + table(head, rows)), "utf-8")
    print(f"highest rate that meets {args.slo}: {best:.3f} requests/s")
    print(f"report: {folder / 'index.html'}")
    return 0 if best > 0 else 3


def run_scheduler(args: argparse.Namespace) -> int:
    from cluster.bench.scheduler import CASES, SCALING, measure
    from cluster.commands.simulate import new_table, print_table

    table = new_table("case", "plan P50 us", "plan P99", "commit P50", "preemptions")
    for case in (*CASES, *SCALING):
        timing = measure(case, args.steps)
        numbers = (timing.plan_p50, timing.plan_p99, timing.commit_p50)
        table.add_row(case.name, *(f"{v:.1f}" for v in numbers), str(timing.preemptions))
    print_table("The scheduler alone, thread CPU time per step", table)
    if args.vllm_python is not None:
        _print_beside_vllm(args.vllm_python, args.rounds, args.steps)
    return 0


def run_cpu(args: argparse.Namespace) -> int:
    from cluster.bench.cpu_peers import Work, compare, contenders
    from cluster.commands.simulate import new_table, print_table
    from workers.pull import default_cache_dir, pull_default

    model = args.model or pull_default(default_cache_dir(), lambda stage, share: None)
    work = Work(model, args.dtype, args.budget, args.threads)
    entered = contenders(work, args.vllm_python, args.openvino_python, args.openvino_model)
    table = new_table(
        "engine", "tokens/s", "of ours", "TTFT P50 ms", "ITL P50", "ITL P99", "P99 of ours"
    )
    for row in compare(entered, args.rounds):
        times = (row.ttft_p50_ms, row.itl_p50_ms, row.itl_p99_ms)
        table.add_row(
            row.name,
            f"{row.tokens_per_s:.0f}",
            f"{row.ratio:.2f}",
            *(f"{t:.0f}" for t in times),
            f"{row.itl_ratio:.2f}",
        )
    print_table(
        f"32 requests of 128 and 512 tokens, 16 at a time, 64 out, {args.dtype}, "
        f"{args.threads} threads, budget {args.budget}; targets: a peer at most 0.91 of our "
        "tokens/s and at least 1.00 of our ITL P99, gRPC at least 0.85",
        table,
    )
    return 0


def _print_beside_vllm(python: Path, rounds: int, steps: int) -> None:
    from cluster.bench.beside import beside_vllm
    from cluster.commands.simulate import new_table, print_table
    from workers.pull import default_cache_dir, pull_default

    model = pull_default(default_cache_dir(), lambda stage, share: None)
    table = new_table("case", "Headway us", "vLLM us", "ratio")
    for row in beside_vllm(python, model, rounds, steps):
        table.add_row(row.case, f"{row.ours_us:.0f}", f"{row.theirs_us:.0f}", f"{row.ratio:.3f}")
    print_table("plan + commit beside vLLM's schedule + update, medians per step", table)


def run_fleet(args: argparse.Namespace) -> int:
    from cluster.bench.fleet import run

    run(args.offers)
    return 0


def run_metrics(args: argparse.Namespace) -> int:
    """Exit code 0 if metrics cost less than 2% of router and engine, 1 if not."""
    from cluster.bench.metrics import LIMIT, EngineBench, RouterBench, cost_of
    from cluster.commands.simulate import new_table, print_table
    from cluster.text.tokenizer import Tokenizer
    from workers.pull import default_cache_dir, pull_default

    model = pull_default(default_cache_dir(), lambda stage, share: None)
    benches: list[Callable[[], Bench]] = [lambda: RouterBench(Tokenizer.from_folder(model))]
    benches += [partial(EngineBench, streams) for streams in (1, 16, 128)]
    costs = [cost_of(bench(), args.rounds) for bench in benches]
    table = new_table("CPU", "without, us", "with", "in pairs", "noise", "by itself, us", "share")
    for cost in costs:
        pairs = f"{cost.low:+.1%} to {cost.high:+.1%}"
        noise = f"±{cost.noise:.1%}"
        numbers = (f"{cost.without_us:.1f}", f"{cost.with_us:.1f}", pairs, noise)
        table.add_row(cost.what, *numbers, f"{cost.added_us:.2f}", f"{cost.added:.2%}")
    print_table(f"What metrics cost, scrapes every 5 s included; the limit is {LIMIT:.0%}", table)
    return 0 if all(cost.holds for cost in costs) else 1


def run_relief(args: argparse.Namespace) -> int:
    import logging

    from cluster.bench import live_relief, relief

    def say(line: str) -> None:
        print(line, flush=True)

    # Every run ends with engines that are let go of.
    logging.getLogger("cluster").setLevel(logging.ERROR)
    say("simulated: four H100 with Llama-3-8B")
    relief.run(args.requests, say)
    if args.live_requests:
        say(f"\nfor real: tiny engines here, steps of {live_relief.STEP_MS:g} ms at least")
        live_relief.run(args.live_requests, args.rounds, say)
    return 0


def run_promise(args: argparse.Namespace) -> int:
    """Exit code 0 if the learning budget keeps its promise on every trace, 1 if not."""
    from cluster.commands.simulate import new_table, print_table
    from cluster.sim.promise import judge_all

    kept = True
    for verdict in judge_all(args.requests):
        table = new_table("budget", "tok/s", "TTFT P50 ms", "ITL P99 ms", "holds")
        for outcome in (verdict.learned, *verdict.fixed):
            found = outcome.summary
            numbers = (f"{found.tok_s:.1f}", f"{found.ttft_p50_ms:.1f}", f"{found.itl_p99_ms:.2f}")
            table.add_row(outcome.budget, *numbers, "yes" if outcome.holds else "no")
        best = verdict.best_fixed.budget if verdict.best_fixed is not None else "none"
        word = "kept" if verdict.kept else "NOT kept"
        name = f"{verdict.case.trace} x{verdict.case.rate_scale:g}"
        print_table(f"{name}: promise {word}; best fixed budget that holds: {best}", table)
        kept &= verdict.kept
    return 0 if kept else 1


def _kv_variants(given: Sequence[str] | None) -> tuple[Variant, ...]:
    from cluster.bench.experiments import Variant

    chosen = given or (
        "local=--max-moves 0",
        "cluster-wide=--max-moves 3",
    )
    variants = []
    for text in chosen:
        name, equals, options = text.partition("=")
        if not equals or not name or "/" in name:
            raise ConfigError(f"--variant takes NAME=OPTIONS, got {text!r}")
        variants.append(Variant(name, tuple(options.split())))
    return tuple(variants)


def _compare(experiment: Experiment, folder: Path) -> list[Row]:
    from cluster.bench.experiments import COLUMNS, cells, run_variant, write_report
    from cluster.commands.simulate import new_table, print_table
    from loadtests.report import result_folder, write_outcome

    result_folder(folder)
    rows = []
    for variant in experiment.variants:
        print(f"serving: {variant.name}", flush=True)
        try:
            row = run_variant(experiment, variant)
            write_outcome(row.outcome, folder / row.name)
            rows.append(row)
        except HeadwayError as error:
            # What was measured before it must not be lost.
            print(f"{variant.name}: {error}", file=sys.stderr, flush=True)
    if not rows:
        raise HeadwayError("no variant could be measured")
    path = write_report(folder, f"Headway: {experiment.title}", rows)
    table = new_table("", *(label for label, _, _ in COLUMNS), "verdict")
    for row in rows:
        verdict = {0: "met", 3: "missed", 4: "INVALID"}[row.outcome.exit_code]
        table.add_row(row.name, *cells(row), verdict)
    print_table(f"{experiment.title}; ms, of the streams only where not `long`", table)
    print(f"report: {path}")
    return rows


def _say_gain(rows: Sequence[Row]) -> None:
    """The articles' claim, where both of its sides were measured."""
    by_name = {row.name: row for row in rows}
    before, after = by_name.get("continuous"), by_name.get("chunked")
    if before is None or after is None:
        return
    print("chunked against continuous:")
    for label, name in (
        ("ITL P99", "itl_p99_ms"),
        ("longest gap", "longest_gap_ms"),
        ("ITL P99 as emitted", "emitted_p99_ms"),
        ("longest gap as emitted", "emitted_gap_ms"),
        ("tokens/s", "tokens_per_s"),
    ):
        one, other = getattr(before, name), getattr(after, name)
        print(f"  {label}: {100.0 * (other / one - 1):+.1f}%" if one else f"  {label}: -")


def _code(experiment: Experiment, rows: Sequence[Row]) -> int:
    if len(rows) < len(experiment.variants):
        return 1
    return 4 if any(row.outcome.exit_code == 4 for row in rows) else 0


def _serve(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(args.serve.split())
