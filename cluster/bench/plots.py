"""The plots of README.md and docs/: the scheduler that serves, simulated, drawn as SVG.

Virtual time makes them the same on every machine. The data stands in the file's metadata beside the
command, so that a test can run it again and compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from cluster.bench import relief
from cluster.bench.svg import Axis, Bars, Lines, Panel, figure
from cluster.core.policies import PolicyChoice
from cluster.fleet.gate import GateSettings
from cluster.sim.article import WHOLE_PROMPTS, article_experiment
from cluster.sim.experiment import EngineSetup, Experiment, Machine, with_budget
from cluster.sim.fleetchoice import SKEWED, FleetChoice
from cluster.sim.metrics import Objectives
from cluster.sim.workload import Lengths, Synthetic, article_workload

Data: TypeAlias = dict[str, Any]

DIGITS = 6
"""Significant ones kept: what libms differ by is below."""
COST = "Cost model: roofline of one H100 (55% of its arithmetic, 80% of its bandwidth), Llama-3-8B."
ARTICLE_LOAD = "160 requests at 6/s (Poisson, seed 11), prompts of 1,024 and outputs of 128 tokens"
IN_ORDER = ("static", "dynamic", "continuous", "orca", "chunked")
"""Each does away with a trouble of the one before."""
BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
RATES = (4, 8, 12, 16, 20, 24, 28, 32, 36)
OVERLOAD_S = 40
OVERLOAD_SEQS = 64
OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=math.inf, itl_s=0.025)
WAYS = ("at home", "cluster-wide")
RELIEF_REQUESTS = 600
RELIEF_CASE = relief.Case("skewed", SKEWED, 4, 7.0, relief.KV_TOKENS // 4)


@dataclass(frozen=True, slots=True)
class Plot:
    """measure: runs the simulations, with a share of the requests. notes: workload and machine."""

    name: str
    title: str
    notes: tuple[str, ...]
    measure: Callable[[float], Data]
    panels: Callable[[Data], list[Panel]]

    def svg(self, data: Data) -> str:
        command = f"headway plots --only {self.name} FOLDER"
        notes = (*self.notes, f"The real scheduler in virtual time: {command}")
        about = {"command": command, "notes": list(self.notes), "data": data}
        return figure(self.title, notes, self.panels(data), about)


def write(folder: Path, names: tuple[str, ...], share: float) -> Iterator[tuple[Path, Data]]:
    """Run and draw one after the other. share: of each workload's requests; 1 is what is published.

    Raises OSError when the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        plot = PLOTS[name]
        data = plot.measure(share)
        path = folder / f"{name}.svg"
        path.write_text(plot.svg(data), "utf-8")
        yield path, data


def _kept(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _cells(columns: dict[str, str], summary: Any) -> dict[str, float]:
    return {name: _kept(getattr(summary, column)) for name, column in columns.items()}


def _of_article(experiment: Experiment, share: float) -> Experiment:
    """The experiment on the first requests of the articles' workload."""
    workload = article_workload()
    requests = max(1, round(share * workload.requests))
    return replace(experiment, workload=replace(workload, requests=requests))


# -- policies: how steps are composed -------------------------------------------------------------


def _measure_policies(share: float) -> Data:
    columns = {
        "longest gap ms": "max_gap_ms",
        "ITL P99 ms": "itl_p99_ms",
        "TTFT P99 ms": "ttft_p99_ms",
        "tokens/s": "tok_s",
    }
    return {
        policy: _cells(columns, _of_article(article_experiment(policy), share).run())
        for policy in IN_ORDER
    }


def _policies_panels(data: Data) -> list[Panel]:
    def bars(column: str, axis: Axis) -> Bars:
        return Bars(axis, {policy: cells[column] for policy, cells in data.items()})

    return [
        bars("longest gap ms", Axis("longest gap, ms (log)", log=True)),
        bars("TTFT P99 ms", Axis("P99 to first token, ms (log)", log=True)),
        bars("tokens/s", Axis("output tokens/s")),
    ]


# -- budget: the one number of chunked prefill ----------------------------------------------------


def _measure_budget(share: float) -> Data:
    columns = {
        "longest gap": "max_gap_ms",
        "ITL P99": "itl_p99_ms",
        "TTFT P99": "ttft_p99_ms",
        "TTFT P50": "ttft_p50_ms",
        "tokens/s": "tok_s",
    }
    base = _of_article(article_experiment("chunked"), share)
    return {
        str(budget): _cells(columns, replace(base, setup=with_budget(base.setup, budget)).run())
        for budget in (*BUDGETS, "itl")
    }


def _budget_panels(data: Data) -> list[Panel]:
    def lines(*columns: str) -> Lines:
        series = {c: [data[str(budget)][c] for budget in BUDGETS] for c in columns}
        return Lines(
            Axis("token budget of a step, tokens (log)", log=True),
            Axis("ms (log)", log=True),
            BUDGETS,
            series,
        )

    return [lines("longest gap", "ITL P99"), lines("TTFT P99", "TTFT P50")]


# -- relief: where a preempted sequence goes on ---------------------------------------------------


def _measure_relief(share: float) -> Data:
    columns = {
        "preemptions": "preemptions",
        "moves": "moves",
        "stall P50 ms": "stall_p50_ms",
        "worst stall ms": "stall_max_ms",
        "TPOT P99 ms": "tpot_p99_ms",
        "tokens/s": "tok_s",
    }
    requests = max(1, round(share * RELIEF_REQUESTS))
    return {
        way: _cells(columns, relief.experiment(RELIEF_CASE, relief.WAYS[way], requests).run())
        for way in WAYS
    }


def _relief_panels(data: Data) -> list[Panel]:
    def bars(column: str, axis: Axis) -> Bars:
        return Bars(axis, {way: cells[column] for way, cells in data.items()})

    return [
        bars("stall P50 ms", Axis("median stall, ms (log)", log=True)),
        bars("worst stall ms", Axis("worst stall, ms (log)", log=True)),
        bars("TPOT P99 ms", Axis("P99 of TPOT, ms")),
    ]


# -- overload: what still arrives in time ---------------------------------------------------------


def _measure_overload(share: float) -> Data:
    ungated = FleetChoice(binding="late")
    gate = GateSettings(queue_timeout_s=math.inf, ttft_objective_s=OBJECTIVES.ttft_s)
    variants: dict[str, tuple[str, int, FleetChoice]] = {
        "continuous": ("continuous", WHOLE_PROMPTS, ungated),
        "chunked 512": ("chunked", 512, ungated),
        "chunked 512, refusing late ones": ("chunked", 512, replace(ungated, gate=gate)),
    }
    return {
        "rates": list(RATES),
        "goodput/s": {
            name: [
                _kept(_overloaded(policy, budget, fleet, rate, share).run().goodput_rps)
                for rate in RATES
            ]
            for name, (policy, budget, fleet) in variants.items()
        },
    }


def _overloaded(
    policy: str, budget: int, fleet: FleetChoice, rate: int, share: float
) -> Experiment:
    machine = Machine.named("h100", "llama-3-8b")
    policies = PolicyChoice(batching=policy)
    setup = EngineSetup(budget, OVERLOAD_SEQS, machine.kv_tokens(), policies=policies)
    requests = max(1, round(share * OVERLOAD_S * rate))
    workload = Synthetic(requests, rate, Lengths(1024), Lengths(128), seed=11)
    return Experiment(setup, machine.cost(), workload, objectives=OBJECTIVES, fleet=fleet)


def _overload_panels(data: Data) -> list[Panel]:
    return [
        Lines(
            Axis("offered requests per second"),
            Axis("requests/s within the objectives"),
            data["rates"],
            data["goodput/s"],
        )
    ]


PLOTS = {
    plot.name: plot
    for plot in (
        Plot(
            "policies",
            "The same load under every way of composing a step",
            (f"{ARTICLE_LOAD}, at most 16 at once; chunked with a budget of 512.", COST),
            _measure_policies,
            _policies_panels,
        ),
        Plot(
            "budget",
            "What the token budget trades",
            (f"{ARTICLE_LOAD}, at most 16 at once, chunked.", COST),
            _measure_budget,
            _budget_panels,
        ),
        Plot(
            "relief",
            "A preempted sequence goes on at home, or where there is room",
            (
                f"4 engines of {RELIEF_CASE.kv_tokens:,} KV tokens, {RELIEF_REQUESTS} requests at "
                f"{RELIEF_CASE.rate:g}/s dealt out 40/30/20/10; prompts of 300, outputs of 2,500.",
                COST,
            ),
            _measure_relief,
            _relief_panels,
        ),
        Plot(
            "overload",
            "Goodput beyond what one engine can do",
            (
                f"Poisson for {OVERLOAD_S} s (seed 11), prompts of 1,024 and outputs of 128 "
                f"tokens, at most {OVERLOAD_SEQS} at once.",
                "Objectives: first token within 1 s, and 99% of a request's gaps within 25 ms.",
                COST,
            ),
            _measure_overload,
            _overload_panels,
        ),
    )
}
