"""The four-policy table of "Batching: static, dynamic, continuous and chunked prefill", run again.

One H100, Llama-3-8B, 160 requests at 6 per second, at most 16 sequences; Orca's fused prompts are
the fifth row. GOLDEN is what an independent program gave for the same workload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.policies import PolicyChoice
from cluster.sim.experiment import EngineSetup, Experiment, Machine
from cluster.sim.metrics import Summary
from cluster.sim.workload import article_workload

POLICIES = {
    "static": "static",
    "dynamic": "dynamic",
    "continuous": "continuous",
    "chunked": "chunked",
    "orca": "fused",
}
"""The article's names and ours."""
MAX_BATCH = 16
CHUNK_BUDGET = 512
WHOLE_PROMPTS = 1 << 20
"""Budget of the policies that the article lets take whole prompts, however many."""

COLUMNS = (
    "tok_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "itl_p99_ms",
    "max_gap_ms",
    "tpot_p99_ms",
    "slo_met_percent",
)


def _cells(*values: float) -> dict[str, float]:
    return dict(zip(COLUMNS, values, strict=True))


GOLDEN: dict[str, dict[str, float]] = {
    "static": _cells(763.85278, 3529.50049, 6502.47410, 7.14344, 7.15352, 7.11452, 7.5),
    "dynamic": _cells(759.37380, 3109.96829, 6015.67539, 7.20234, 7.21235, 7.17399, 15.625),
    "continuous": _cells(887.94792, 31.69373, 195.52116, 60.78026, 260.81636, 12.44276, 100.0),
    "chunked": _cells(889.27436, 32.32173, 113.23465, 15.55379, 16.50327, 9.51311, 100.0),
    "orca": {
        "tok_s": 888.4,
        "ttft_p99_ms": 184.9,
        "itl_p99_ms": 47.4,
        "max_gap_ms": 161.0,
        "tpot_p99_ms": 11.3,
    },
}
"""Cells that the article gives; Orca's are rounded in it."""


@dataclass(frozen=True, slots=True)
class ArticleTable:
    """Our numbers by the article's policy names."""

    ours: dict[str, Summary]

    def cell(self, policy: str, column: str) -> float:
        return float(getattr(self.ours[policy], column))

    def as_json(self) -> dict[str, dict[str, dict[str, float]]]:
        return {"policies": {p: {c: self.cell(p, c) for c in COLUMNS} for p in self.ours}}


def article_experiment(
    policy: str, *, seed: int = 11, budget: int = CHUNK_BUDGET, max_num_seqs: int = MAX_BATCH
) -> Experiment:
    """policy: one of the article's names. budget: counts for chunked only."""
    machine = Machine.named("h100", "llama-3-8b")
    setup = EngineSetup(
        budget=budget if policy == "chunked" else WHOLE_PROMPTS,
        max_num_seqs=max_num_seqs,
        kv_tokens=machine.kv_tokens(),
        policies=PolicyChoice(batching=POLICIES[policy]),
    )
    return Experiment(setup, machine.cost(), article_workload(seed))


def run_article(progress: Callable[[str], None] | None = None) -> ArticleTable:
    """All five rows, a second or two in all."""
    ours: dict[str, Summary] = {}
    for policy in POLICIES:
        if progress is not None:
            progress(policy)
        ours[policy] = article_experiment(policy).run()
    return ArticleTable(ours)
