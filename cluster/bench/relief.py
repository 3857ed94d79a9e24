"""Cluster-wide preemption against recomputing at home, simulated: the first half of
`headway bench relief`, of which live_relief is the second.

Four H100 with Llama-3-8B, long outputs, a pool of 488k tokens each. Requests are dealt out 40/30/
20/10 on purpose: the first engine runs out of blocks while the last has plenty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.core.policies import PolicyChoice
from cluster.fleet.relief import ReliefSettings
from cluster.sim.experiment import EngineSetup, Experiment, Machine
from cluster.sim.fleetchoice import SKEWED, FleetChoice
from cluster.sim.metrics import Summary
from cluster.sim.workload import Lengths, Synthetic

RATE = 10.5
KV_TOKENS = 488_000


@dataclass(frozen=True, slots=True)
class Case:
    """rate: requests per second for all engines."""

    name: str
    placement: str
    engines: int
    rate: float
    kv_tokens: int = KV_TOKENS


CASES = (
    Case("skewed 40/30/20/10", SKEWED, 4, RATE),
    Case("balanced", "least-outstanding", 4, RATE),
    Case("every engine full", "least-outstanding", 4, RATE, KV_TOKENS // 6),
    Case("one engine", "least-outstanding", 1, RATE / 4, KV_TOKENS // 6),
)
WAYS = {
    "at home": FleetChoice(),
    "cluster-wide": FleetChoice(relief=ReliefSettings()),
    "late binding": FleetChoice(binding="late", relief=ReliefSettings()),
}


def experiment(case: Case, way: FleetChoice, requests: int) -> Experiment:
    machine = Machine.named("h100", "llama-3-8b")
    setup = EngineSetup(
        budget=512,
        max_num_seqs=256,
        kv_tokens=case.kv_tokens,
        watermark=0.02,
        # As vLLM admits: what an engine expects to need later plays no part.
        policies=PolicyChoice(reservation="on-demand"),
    )
    workload = Synthetic(requests, case.rate, Lengths(300, 0.6), Lengths(2500, 1.0), seed=3)
    fleet = replace(way, placement=case.placement)
    return Experiment(setup, machine.cost(), workload, engines=case.engines, fleet=fleet)


def run(requests: int, say: Callable[[str], None]) -> None:
    """Prints a table, a line as soon as it is known."""
    say(
        f"{'case':<19} {'preempted goes on':<18} {'preempt':>7} {'moves':>6} {'stall P50':>10} "
        f"{'worst s':>8} {'TPOT P99':>9} {'TTFT P99':>9} {'tok/s':>7}"
    )
    for case in CASES:
        for name, way in WAYS.items():
            if case.placement == SKEWED and way.binding == "late":
                # A placement that ignores room has nothing to bind late.
                continue
            summary = experiment(case, way, requests).run()
            say(_line(case, name, summary))


def _line(case: Case, way: str, s: Summary) -> str:
    return (
        f"{case.name:<19} {way:<18} {s.preemptions:>7} {s.moves:>6} {s.stall_p50_ms / 1e3:>10.2f} "
        f"{s.stall_max_ms / 1e3:>8.2f} {s.tpot_p99_ms:>9.1f} {s.ttft_p99_ms:>9.0f} {s.tok_s:>7.0f}"
    )
