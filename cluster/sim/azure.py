"""What real traffic shows: the Azure traces under prefill-first and chunked batching.

The first 8,000 requests of each trace on one H100 with Llama-3-8B; GOLDEN is what an independent
simulator measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cluster.core.policies import PolicyChoice
from cluster.sim.experiment import EngineSetup, Experiment, Machine
from cluster.sim.metrics import Summary
from cluster.sim.traces import TraceOptions, find_trace, read_trace

REQUESTS = 8000
MAX_NUM_SEQS = 256
KV_TOKENS = 488_000
WHOLE_PROMPTS = 1 << 20


class AzureCase(NamedTuple):
    trace: str
    rate_scale: float
    policy: str


class AzureCells(NamedTuple):
    itl_p99_ms: float
    max_gap_ms: float
    ttft_p99_ms: float


GOLDEN: dict[AzureCase, AzureCells] = {
    AzureCase("azure-conv", 1, "continuous"): AzureCells(45, 779, 207),
    AzureCase("azure-conv", 1, "chunked"): AzureCells(16, 21, 207),
    AzureCase("azure-conv", 2, "continuous"): AzureCells(145, 1653, 382),
    AzureCase("azure-conv", 2, "chunked"): AzureCells(16, 21, 367),
    AzureCase("azure-conv", 3, "continuous"): AzureCells(301, 2767, 6703),
    AzureCase("azure-conv", 3, "chunked"): AzureCells(17, 21, 1761),
    AzureCase("azure-code", 1, "continuous"): AzureCells(1653, 14_315, 15_514),
    AzureCase("azure-code", 1, "chunked"): AzureCells(18, 18, 15_775),
}


def azure_experiment(case: AzureCase) -> Experiment:
    """One row of the table."""
    machine = Machine.named("h100", "llama-3-8b")
    setup = EngineSetup(
        budget=512 if case.policy == "chunked" else WHOLE_PROMPTS,
        max_num_seqs=MAX_NUM_SEQS,
        kv_tokens=KV_TOKENS,
        policies=PolicyChoice(batching=case.policy),
    )
    options = TraceOptions(rate_scale=case.rate_scale, limit=REQUESTS)
    return Experiment(setup, machine.cost(), read_trace(find_trace(case.trace), options))


def run_azure(
    progress: Callable[[AzureCase], Callable[[int], None]] | None = None,
) -> Iterator[tuple[AzureCase, Summary]]:
    """Row by row, about two minutes in all on one core.

    progress: given the case that starts, returns what is told the number of finished requests.
    """
    for case in GOLDEN:
        yield case, azure_experiment(case).run(None if progress is None else progress(case))


def cells(summary: Summary) -> AzureCells:
    return AzureCells(summary.itl_p99_ms, summary.max_gap_ms, summary.ttft_p99_ms)
