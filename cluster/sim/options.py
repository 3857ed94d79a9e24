"""Command-line options of simulated experiments, shared by `headway simulate` and `headway plan`.

Imports little, so that the parser of every other command is not slowed down by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.sim.costs.base import StepCost
    from cluster.sim.engine import Slowdown
    from cluster.sim.experiment import EngineSetup, Experiment, Machine
    from cluster.sim.traces import Trace
    from cluster.sim.workload import Synthetic

SYNTHETIC = ("poisson", "gamma", "constant", "article")
POLICY_NAMES = {"orca": "fused"}
DEFAULT_BUDGET = 512
WHOLE_PROMPTS = 1 << 20
"""Default budget of the policies that take whole prompts."""
DEFAULT_REQUESTS = 2000


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        default="poisson",
        metavar="NAME|FILE",
        help="poisson, gamma, constant, article, a shipped trace (azure-conv, azure-code, "
        "mooncake), or a trace file: .jsonl or Azure .csv, also gzipped (default: %(default)s)",
    )
    group.add_argument("--rate", type=float, default=6.0, metavar="R", help="requests per second")
    group.add_argument("--requests", type=int, metavar="N", help="requests, or rows of a trace")
    group.add_argument("--prompt", type=float, default=1024, metavar="TOKENS", help="mean prompt")
    group.add_argument("--output", type=float, default=128, metavar="TOKENS", help="mean output")
    group.add_argument("--cv", type=float, default=0.6, help="spread of the lengths (lognormal)")
    group.add_argument(
        "--burstiness", type=float, default=3.0, metavar="CV", help="of gamma's gaps; 1 is Poisson"
    )
    group.add_argument("--seed", type=int, default=11, metavar="N", help="of what is drawn")
    group.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="trace: speed")
    group.add_argument(
        "--length-scale", type=float, default=1.0, metavar="X", help="trace: lengths"
    )
    group.add_argument("--max-input", type=int, metavar="TOKENS", help="trace: cap on prompts")
    group.add_argument("--max-output", type=int, metavar="TOKENS", help="trace: cap on outputs")
    group.add_argument("--spread", action="store_true", help="trace: spread equal timestamps")
    group.add_argument(
        "--skip-malformed", action="store_true", help="trace: count bad rows instead of stopping"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--policy",
        default="chunked",
        metavar="NAME",
        help="static, dynamic, continuous, fused (orca) or chunked (default: %(default)s)",
    )
    group.add_argument("--queue", metavar="NAME", help="order of those who wait")
    group.add_argument("--victims", metavar="NAME", help="who gives way when blocks run out")
    group.add_argument("--reservation", metavar="NAME", help="blocks taken at admission")
    group.add_argument(
        "--with",
        dest="policy_options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other option of the policies; repeatable",
    )
    group.add_argument("--max-queue-delay", metavar="TIME", help="of dynamic (default: 50ms)")
    group.add_argument("--budget", type=int, metavar="TOKENS", help="tokens per step")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="pool (default: what fits)")
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    group.add_argument("--watermark", type=float, default=0.02, metavar="SHARE")
    group.add_argument("--max-model-len", type=int, default=1 << 17, metavar="TOKENS")
    group.add_argument("--engines", type=int, default=1, metavar="N")
    group.add_argument(
        "--hardware", default="h100", metavar="NAME", help="a100, h100, h200, b200, cpu"
    )
    group.add_argument(
        "--model", default="llama-3-8b", metavar="NAME", help="or a size: 8b, 70b, ..."
    )
    group.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    group.add_argument(
        "--slow-down", metavar="FACTOR@TIME", help="steps take FACTOR as long from TIME on"
    )
    group.add_argument(
        "--cost",
        default="roofline",
        metavar="roofline|profiled|FILE",
        help="profiled: measured times of Llama-2-7B on an H100; FILE: a table of your own",
    )


def experiment_of(args: argparse.Namespace) -> Experiment:
    """Raises ConfigError naming the option, the limit and the value."""
    from cluster.sim.experiment import Experiment, Machine
    from cluster.sim.quantities import parse_objectives

    machine = Machine.named(args.hardware, args.model, args.tensor_parallel)
    return Experiment(
        setup=_setup(args, machine),
        cost=_cost(args, machine),
        workload=workload_of(args),
        engines=args.engines,
        objectives=parse_objectives(args.slo),
        slowdown=_slowdown(args.slow_down),
    )


def workload_of(args: argparse.Namespace) -> Synthetic | Trace:
    from cluster.sim.traces import TraceOptions, find_trace, read_trace
    from cluster.sim.workload import Lengths, Synthetic, article_workload

    name = args.workload.lower()
    if name == "article":
        return article_workload(args.seed)
    if name in SYNTHETIC:
        return Synthetic(
            DEFAULT_REQUESTS if args.requests is None else args.requests,
            args.rate,
            Lengths(args.prompt, args.cv),
            Lengths(args.output, args.cv),
            burstiness={"poisson": 1.0, "constant": 0.0}.get(name, args.burstiness),
            seed=args.seed,
        )
    options = TraceOptions(
        rate_scale=args.rate_scale,
        length_scale=args.length_scale,
        max_input=args.max_input,
        max_output=args.max_output,
        limit=args.requests,
        skip_malformed=args.skip_malformed,
        spread=args.spread,
    )
    return read_trace(find_trace(args.workload), options)


def expected_requests(workload: object) -> int | None:
    """How many will arrive, where that is known before."""
    from cluster.sim.traces import Trace
    from cluster.sim.workload import Synthetic

    if isinstance(workload, Synthetic):
        return workload.requests
    return len(workload.requests) if isinstance(workload, Trace) else None


def _setup(args: argparse.Namespace, machine: Machine) -> EngineSetup:
    from cluster.sim.experiment import EngineSetup
    from cluster.sim.quantities import parse_seconds

    batching = POLICY_NAMES.get(args.policy, args.policy)
    policies: dict[str, Any] = {"batching": batching}
    for option in ("queue", "victims", "reservation"):
        if (value := getattr(args, option)) is not None:
            policies[option] = value
    for text in args.policy_options:
        name, value = _policy_option(text)
        policies[name] = value
    if args.max_queue_delay is not None:
        policies["max_queue_delay_s"] = parse_seconds(args.max_queue_delay)
    budget = args.budget
    if budget is None:
        budget = DEFAULT_BUDGET if batching == "chunked" else WHOLE_PROMPTS
    return EngineSetup(
        budget=budget,
        max_num_seqs=args.max_num_seqs,
        kv_tokens=machine.kv_tokens() if args.kv_tokens is None else args.kv_tokens,
        block_size=args.block_size,
        watermark=args.watermark,
        max_model_len=args.max_model_len,
        policies=policies,
    )


def _policy_option(text: str) -> tuple[str, Any]:
    """ "name=value", the value as the number that it looks like, else as text."""
    from cluster.core.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--with takes NAME=VALUE, got {text!r}")
    for kind in (int, float):
        try:
            return name.replace("-", "_"), kind(value)
        except ValueError:
            continue
    return name.replace("-", "_"), value


def _slowdown(text: str | None) -> Slowdown | None:
    """ "1.43@30min": steps take 1.43 times as long from minute 30 on."""
    from cluster.core.errors import ConfigError
    from cluster.sim.engine import Slowdown
    from cluster.sim.quantities import parse_seconds

    if text is None:
        return None
    factor, _, at = text.partition("@")
    try:
        times = float(factor)
    except ValueError:
        times = -1.0
    if not 0.01 <= times <= 100.0:
        raise ConfigError(f"--slow-down takes FACTOR@TIME with a factor 0.01 to 100, got {text!r}")
    return Slowdown(parse_seconds(at), times)


def _cost(args: argparse.Namespace, machine: Machine) -> StepCost:
    from cluster.core.errors import ConfigError

    if args.cost == "roofline":
        return machine.cost(args.block_size)
    from cluster.sim.costs.profiled import SHIPPED_TIMES, ProfiledCost, read_times

    path = SHIPPED_TIMES if args.cost == "profiled" else Path(args.cost)
    if not path.is_file():
        raise ConfigError(f"--cost: no table {args.cost!r}")
    if path == SHIPPED_TIMES and (machine.model.name, machine.hardware.name) != (
        "llama-2-7b",
        "h100",
    ):
        raise ConfigError(
            "--cost profiled was measured with --model llama-2-7b --hardware h100, "
            f"got {machine.model.name} on {machine.hardware.name}"
        )
    times = read_times(path, machine.tensor_parallel)
    return ProfiledCost(
        times, machine.hardware, machine.model, machine.tensor_parallel, args.block_size
    )
