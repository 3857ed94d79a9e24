"""How fast the simulator itself is: engine steps per second of one core."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster.sim.experiment import EngineSetup, Experiment, Machine
from cluster.sim.metrics import Meter, Objectives
from cluster.sim.traces import TraceOptions, find_trace, read_trace


@dataclass(frozen=True, slots=True)
class BenchResult:
    """rows: sequences in a step on average. process_s: CPU time."""

    steps: int
    tokens: int
    rows: float
    process_s: float

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.process_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.process_s


def run_bench(requests: int = 4000, trace: str = "azure-conv") -> BenchResult:
    """The first requests of a trace under chunked prefill on one H100 with Llama-3-8B."""
    machine = Machine.named("h100", "llama-3-8b")
    setup = EngineSetup(budget=512, max_num_seqs=256, kv_tokens=machine.kv_tokens())
    workload = read_trace(find_trace(trace), TraceOptions(limit=requests))
    experiment = Experiment(setup, machine.cost(), workload)
    meter = Meter(Objectives())
    started = time.process_time()
    summary = experiment.run(meter=meter)
    elapsed = time.process_time() - started
    tokens = meter.totals.tokens
    return BenchResult(summary.steps, tokens, tokens / summary.steps, elapsed)
