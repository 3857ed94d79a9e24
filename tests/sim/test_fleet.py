"""Relief and the gate over time: the simulator drives the very objects that routers use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.policies import PolicyChoice
from cluster.fleet.gate import GateSettings
from cluster.fleet.relief import ReliefSettings
from cluster.sim.experiment import EngineSetup, Experiment, Machine
from cluster.sim.fleetchoice import SKEWED, FleetChoice
from cluster.sim.metrics import Objectives, Summary
from cluster.sim.workload import Lengths, Synthetic

MACHINE = Machine.named("h100", "llama-3-8b")
SMALL_POOL = EngineSetup(
    budget=512,
    max_num_seqs=256,
    kv_tokens=24_000,
    policies=PolicyChoice(reservation="on-demand"),
)
RATE = 30.0


def run(fleet: FleetChoice, engines: int, rate: float, requests: int = 700) -> Summary:
    workload = Synthetic(requests, rate, Lengths(300, 0.6), Lengths(600, 1.0), seed=3)
    experiment = Experiment(SMALL_POOL, MACHINE.cost(), workload, engines=engines, fleet=fleet)
    return experiment.run()


def both_ways(placement: str, engines: int, rate: float) -> tuple[Summary, Summary]:
    """Preemption at home, and with relief."""
    home = FleetChoice(placement)
    return run(home, engines, rate), run(replace(home, relief=ReliefSettings()), engines, rate)


def test_under_skew_relief_shortens_stalls_and_gaps_and_gives_more_tokens():
    home, relief = both_ways(SKEWED, 4, RATE)
    assert home.preemptions > 100, "the load does not run out of blocks"
    assert relief.moves > 100
    assert relief.requests == home.requests
    assert relief.tok_s > 1.1 * home.tok_s
    assert relief.tpot_p99_ms < 0.8 * home.tpot_p99_ms
    assert relief.stall_max_ms < 0.6 * home.stall_max_ms
    assert relief.ttft_p99_ms < 0.5 * home.ttft_p99_ms


@pytest.mark.parametrize(
    ("placement", "engines", "rate"),
    [
        ("least-outstanding", 4, RATE),
        ("least-outstanding", 4, 1.6 * RATE),
        ("least-outstanding", 1, 0.3 * RATE),
    ],
    ids=["balanced", "all full", "one engine"],
)
def test_relief_is_never_worse_where_there_is_nothing_to_win(placement, engines, rate):
    home, relief = both_ways(placement, engines, rate)
    assert relief.tok_s >= 0.98 * home.tok_s
    assert relief.tpot_p99_ms <= 1.02 * home.tpot_p99_ms
    assert relief.stall_max_ms <= 1.02 * home.stall_max_ms
    assert relief.recompute_percent <= 1.1 * home.recompute_percent + 0.5


def test_late_binding_needs_no_relief_under_a_placement_that_can_choose():
    eager = run(FleetChoice("least-outstanding"), 4, RATE)
    late = run(FleetChoice("least-outstanding", "late"), 4, RATE)
    assert late.tok_s >= 0.98 * eager.tok_s
    assert late.preemptions < eager.preemptions


def test_at_three_times_the_capacity_goodput_holds_and_the_admitted_are_served_well():
    setup = EngineSetup(budget=512, max_num_seqs=64, kv_tokens=60_000)
    objectives = Objectives(ttft_s=2.0, tpot_s=0.025)
    fleet = FleetChoice(
        "least-outstanding",
        "late",
        ReliefSettings(),
        GateSettings(ttft_objective_s=2.0, queue_timeout_s=10.0),
    )

    def at(rate: float) -> Summary:
        workload = Synthetic(int(rate * 45), rate, Lengths(512, 0.6), Lengths(256, 0.8), seed=3)
        return Experiment(
            setup, MACHINE.cost(), workload, engines=2, fleet=fleet, objectives=objectives
        ).run()

    calm, peak, flood = at(20.0), at(45.0), at(135.0)
    assert calm.refused == 0
    assert flood.refused > 1.5 * peak.requests, "the flood is none"
    assert flood.goodput_rps >= 0.9 * peak.goodput_rps
    assert flood.tpot_p99_ms <= 1.5 * calm.tpot_p99_ms


def test_high_priorities_hold_cluster_wide():
    """They find room on whichever engine runs lower ones, and those go on elsewhere."""
    setup = replace(SMALL_POOL, policies=PolicyChoice(reservation="on-demand", queue="priority"))
    base = Synthetic(400, RATE, Lengths(300, 0.6), Lengths(600, 1.0), seed=3)
    mixed = [r._replace(priority=9 * (n % 10 == 0)) for n, r in enumerate(base)]
    fleet = FleetChoice("least-outstanding", "late", ReliefSettings())
    experiment = Experiment(setup, MACHINE.cost(), mixed, engines=3, fleet=fleet)
    from cluster.sim.metrics import Meter

    meter = Meter(keep=True)
    experiment.run(meter=meter)
    waits: dict[bool, list[float]] = {True: [], False: []}
    for number, record in meter.records.items():
        waits[mixed[number - 1].priority > 0].append(record.ttft_s)
    urgent, others = (sorted(waits[key]) for key in (True, False))
    assert urgent[int(0.9 * len(urgent))] < 0.3 * others[int(0.9 * len(others))]


def test_a_run_repeats():
    fleet = FleetChoice("power-of-two", "late", ReliefSettings())
    assert run(fleet, 3, RATE, 200) == run(fleet, 3, RATE, 200)
