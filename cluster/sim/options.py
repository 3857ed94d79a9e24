"""Command-line options of simulated experiments, shared by `headway simulate` and `headway plan`.

Imports little, so that the parser of every other command is not slowed down by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.core.policies import PolicyChoice
    from cluster.sim.costs.base import StepCost
    from cluster.sim.engine import Slowdown
    from cluster.sim.experiment import EngineSetup, Experiment, Machine
    from cluster.sim.fleetchoice import FleetChoice
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
    group.add_argument("--queue", metavar="NAME", help="fcfs, priority, deadline or fair")
    group.add_argument(
        "--victims",
        metavar="NAME",
        help="last-admitted, lowest-priority, least-computed or cheapest-recompute",
    )
    group.add_argument(
        "--reservation", metavar="NAME", help="on-demand, prompt, worst-case or estimated-peak"
    )
    group.add_argument("--preemption", metavar="NAME", help="recompute or swap")
    group.add_argument("--prefix-cache", metavar="NAME", help="off or on")
    group.add_argument("--host-blocks", type=int, metavar="N", help="host memory for swap")
    group.add_argument("--max-queue-delay", type=float, metavar="MS", help="of dynamic (50)")
    group.add_argument(
        "--budget",
        metavar="TOKENS|itl",
        help="tokens per step, or itl: as many as --itl-objective allows",
    )
    group.add_argument("--itl-objective", type=float, metavar="MS", help="of --budget itl (25)")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="pool (default: what fits)")
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    group.add_argument("--watermark", type=float, default=0.02, metavar="SHARE")
    group.add_argument("--max-model-len", type=int, default=1 << 17, metavar="TOKENS")
    group.add_argument("--engines", type=int, default=1, metavar="N")
    group.add_argument(
        "--placement",
        default="least-loaded",
        metavar="NAME",
        help="least-loaded, least-outstanding, round-robin, power-of-two, prefix-affinity, "
        "session-affinity, or skewed: 40/30/20/10 %% of the requests (default: %(default)s)",
    )
    group.add_argument(
        "--binding",
        default="eager",
        metavar="NAME",
        help="eager: wait at an engine; late: wait at the router (default: %(default)s)",
    )
    group.add_argument(
        "--max-moves",
        type=int,
        default=0,
        metavar="N",
        help="relief: moves of one request to another engine when blocks run out (0: never)",
    )
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
        fleet=_fleet(args),
    )


def workload_of(args: argparse.Namespace) -> Synthetic | Trace:
    """A trace is read here, so that a bad row ends the command before anything is simulated."""
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
    from cluster.core.errors import ConfigError
    from cluster.sim.experiment import EngineSetup, parse_budget, with_budget

    policies = _policies(args, machine)
    whole_prompts = policies.batching != "chunked"
    setup = EngineSetup(
        budget=WHOLE_PROMPTS if whole_prompts else DEFAULT_BUDGET,
        max_num_seqs=args.max_num_seqs,
        kv_tokens=machine.kv_tokens() if args.kv_tokens is None else args.kv_tokens,
        block_size=args.block_size,
        watermark=args.watermark,
        max_model_len=args.max_model_len,
        policies=policies,
    )
    if args.budget is None:
        return setup
    try:
        return with_budget(setup, parse_budget(args.budget))
    except ValueError:
        raise ConfigError(f"--budget takes tokens or itl, got {args.budget!r}") from None


def _policies(args: argparse.Namespace, machine: Machine) -> PolicyChoice:
    """Options that were not given keep the scheduler's own defaults."""
    from cluster.core.policies import PolicyChoice
    from cluster.core.preemption import SwapCosts
    from cluster.sim.costs.base import StepSize

    chosen: dict[str, Any] = {"batching": POLICY_NAMES.get(args.policy, args.policy)}
    for name in ("queue", "victims", "reservation", "preemption", "prefix_cache", "host_blocks"):
        if (value := getattr(args, name)) is not None:
            chosen[name] = value
    if args.max_queue_delay is not None:
        chosen["max_queue_delay_s"] = args.max_queue_delay / 1e3
    if args.itl_objective is not None:
        chosen["itl_objective_s"] = args.itl_objective / 1e3
    if args.preemption == "swap" and args.block_size >= 1:
        prompt = StepSize(1024, 1024, 1024 * 1025)
        block_bytes = machine.model.kv_bytes_per_token * args.block_size
        chosen["swap_costs"] = SwapCosts(
            prefill_tokens_per_s=prompt.tokens / machine.cost().of_size(prompt),
            copy_blocks_per_s=machine.hardware.host_link / block_bytes,
        )
    return PolicyChoice(**chosen)


def _fleet(args: argparse.Namespace) -> FleetChoice:
    from cluster.fleet.relief import ReliefSettings
    from cluster.sim.fleetchoice import FleetChoice

    relief = ReliefSettings(max_moves=args.max_moves)
    return FleetChoice(args.placement, args.binding, relief, seed=args.seed)


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
