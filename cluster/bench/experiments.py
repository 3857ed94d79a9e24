"""Load experiments on the embedded model: one load, several ways to serve it, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from cluster.bench.served import Served
from cluster.core.errors import HeadwayError
from cluster.sim.html import page, scatter
from loadtests.job import Job
from loadtests.outcome import Outcome, judge
from loadtests.records import Record
from loadtests.report import group_table, table
from loadtests.runner import run_load
from loadtests.scenario import Scenario
from loadtests.targets.base import TargetSpec
from loadtests.validity import Limits

Say = Callable[[str], None]

LIMITS = Limits(send_lag_ms=100.0, wire_lag_ms=100.0)
"""Client, router and engine share a few cores here, and the stalls looked for are far longer."""


@dataclass(frozen=True, slots=True)
class Variant:
    """name: in tables. options: of `headway serve`."""

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Experiment:
    """One load on every variant. slo: objectives for verdict and goodput.
    warm: a short load that is sent first and not looked at (kernels, caches)."""

    title: str
    scenario: Scenario
    variants: tuple[Variant, ...]
    slo: str = "embedded-cpu"
    shared_options: tuple[str, ...] = ()
    warm: Scenario = field(
        default_factory=lambda: Scenario(arrivals="constant:4", requests=4, output_mean=8)
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A variant's numbers: tokens per second over all requests; ms over the streams, that is
    without the long prompts, but for the gaps by the engine's clock (emitted), which have all."""

    name: str
    outcome: Outcome
    tokens_per_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    longest_gap_ms: float
    emitted_p99_ms: float
    emitted_gap_ms: float
    ttft_p99_ms: float
    long_ttft_p50_ms: float
    preemptions: int
    replays: int


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tok/s", "tokens_per_s", ".1f"),
    ("TPOT P50", "tpot_p50_ms", ".1f"),
    ("P99", "tpot_p99_ms", ".1f"),
    ("ITL P50", "itl_p50_ms", ".1f"),
    ("P99", "itl_p99_ms", ".1f"),
    ("gap", "longest_gap_ms", ".0f"),
    ("emitted P99", "emitted_p99_ms", ".1f"),
    ("gap", "emitted_gap_ms", ".0f"),
    ("TTFT P99", "ttft_p99_ms", ".0f"),
    ("long TTFT", "long_ttft_p50_ms", ".0f"),
    ("preempted", "preemptions", "d"),
    ("moved", "replays", "d"),
)
"""Milliseconds where no unit is named."""


def run_variant(experiment: Experiment, variant: Variant) -> Row:
    """Serve, warm up, measure, stop. Raises HeadwayError."""
    with Served([*experiment.shared_options, *variant.options]) as served:
        target = TargetSpec(address=served.address)
        run_load(Job(experiment.warm, target))
        job = Job(experiment.scenario, target)
        outcome = judge(job, run_load(job), experiment.slo, LIMITS)
    return row_of(variant.name, outcome)


def row_of(name: str, outcome: Outcome) -> Row:
    """Numbers of raw records, so exact."""
    import numpy as np

    done = [r for r in outcome.results.records if r.ok and not r.warmup]
    streams = [r for r in done if r.kind != "long"]
    long = [r for r in done if r.kind == "long"]

    def of(values: Sequence[float], q: float) -> float:
        return float(np.percentile(values, q)) if values else 0.0

    gaps = [gap / 1e3 for r in streams for gap in r.gaps_us]
    tpot = [1e3 * r.tpot_s for r in streams if r.tpot_s is not None]
    span = outcome.results.span_s()
    emitted = outcome.results.histograms["ITL emitted"]
    return Row(
        name=name,
        outcome=outcome,
        tokens_per_s=sum(r.tokens for r in done) / span if span else 0.0,
        tpot_p50_ms=of(tpot, 50),
        tpot_p99_ms=of(tpot, 99),
        itl_p50_ms=of(gaps, 50),
        itl_p99_ms=of(gaps, 99),
        longest_gap_ms=max(gaps, default=0.0),
        emitted_p99_ms=emitted.percentile_ms(99),
        emitted_gap_ms=emitted.max_ms,
        ttft_p99_ms=of([1e3 * r.ttft_s for r in streams], 99),
        long_ttft_p50_ms=of([1e3 * r.ttft_s for r in long], 50),
        preemptions=outcome.results.counts.preemptions,
        replays=outcome.results.counts.replays,
    )


def cells(row: Row) -> list[str]:
    return [format(getattr(row, name), form) for _, name, form in COLUMNS]


def write_report(folder: Path, title: str, rows: Sequence[Row]) -> Path:
    """The comparison; links to every variant's own result, written beside it as it came in."""
    head = ("", *(label for label, _, _ in COLUMNS), "valid")
    valid = ("yes", "NO")
    body = [[r.name, *cells(r), valid[r.outcome.exit_code == 4]] for r in rows]
    dots = [(r.itl_p99_ms, r.tokens_per_s, r.name) for r in rows]
    kinds = "".join(
        f"<h2>{escape(row.name)}</h2>" + group_table(_measured(row), lambda r: r.kind)
        for row in rows
    )
    links = "".join(
        f'<li><a href="{escape(r.name)}/report.html">{escape(r.name)}</a>' for r in rows
    )
    html = page(
        title,
        f"{table(head, body)}<p class=note>Milliseconds.</p>"
        f"{scatter(dots, 'ITL P99, ms', 'tokens per second')}{kinds}<ul>{links}</ul>",
    )
    path = folder / "index.html"
    path.write_text(html, encoding="utf-8")
    return path


def _measured(row: Row) -> list[Record]:
    return [r for r in row.outcome.results.records if r.ok and not r.warmup]


# -- the three experiments -----------------------------------------------------------------------


def policy_variants(budget: int, whole: int, objective_ms: float) -> dict[str, Variant]:
    """Every batching policy. budget: of a chunked step. whole: a budget that any prompt fits."""

    def variant(name: str, policy: str, tokens: int, *more: str) -> Variant:
        options = ("--policy", policy, "--max-num-batched-tokens", str(tokens), *more)
        return Variant(name, options)

    controller = ("--budget", "itl", "--itl-objective", f"{objective_ms:g}")
    return {
        "static": variant("static", "static", whole),
        "dynamic": variant("dynamic", "dynamic", whole),
        "continuous": variant("continuous", "continuous", whole),
        "fused": variant("fused", "fused", whole),
        "chunked": variant("chunked", "chunked", budget),
        "controller": variant("controller", "chunked", whole, *controller),
    }


def head_of_line(
    streams: int,
    output: int,
    long_prompt: int,
    long_every_s: float,
    long_count: int,
    long_first_s: float = 0.0,
) -> Scenario:
    """Streams that run all the time, among which long prompts come."""
    return Scenario(
        arrivals=f"constant:{4 * streams}",
        requests=streams,
        prompt_mean=24,
        prompt_cv=0,
        output_mean=output,
        output_cv=0,
        max_input=max(long_prompt, 24),
        max_output=output,
        long_every_s=long_every_s,
        long_first_s=long_first_s,
        long_count=long_count,
        long_prompt=long_prompt,
        long_output=4,
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """Of a machine. prefill_s: a long prompt alone, until its first token. step_s: a decode step of
    all streams."""

    prefill_s: float
    step_s: float

    def long_prompts_s(self, output: int, long_count: int) -> tuple[float, float]:
        """When the first long prompt must come, and how long after it the next, to come evenly
        among `output` tokens of the streams however they are served: none before the last one is
        done, and all of them in time."""
        apart = output * self.step_s / (long_count + 1)
        return apart, self.prefill_s + apart


def measure_pace(target: TargetSpec, streams: int, long_prompt: int) -> Pace:
    """Raises HeadwayError when the server answers nothing."""
    alone = replace(head_of_line(1, 2, long_prompt, 0.0, 0), prompt_mean=float(long_prompt), seed=1)
    together = head_of_line(streams, 24, 24, 0.0, 0)
    prefill = [r.ttft_s for r in run_load(Job(alone, target)).records if r.ok]
    steps = [r.tpot_s for r in run_load(Job(together, target)).records if r.ok and r.tpot_s]
    if not prefill or not steps:
        raise HeadwayError("the server answered nothing while its pace was measured")
    return Pace(prefill[0], statistics.median(steps))


def highest_rate(
    target: TargetSpec, base: Scenario, slo: str, bounds: tuple[float, float, int], say: Say
) -> list[tuple[float, Outcome]]:
    """Bisection for the highest Poisson rate that meets the objectives.

    bounds: rate that is expected to pass, rate that is expected to fail, halvings. Returns every
    (rate, outcome) tried. An invalid run counts as not met: what was not measured is not met.
    """
    low, high, halvings = bounds
    tried: list[tuple[float, Outcome]] = []

    def meets(rate: float) -> bool:
        job = Job(replace(base, arrivals=f"poisson:{rate:.6g}"), target)
        outcome = judge(job, run_load(job), slo, LIMITS)
        tried.append((rate, outcome))
        verdict = {0: "met", 3: "missed", 4: "invalid"}[outcome.exit_code]
        say(f"{rate:.3f} requests/s: {verdict}, goodput {outcome.goodput_rps:.3f}")
        return outcome.exit_code == 0

    if not meets(low):
        return tried
    if meets(high):
        return tried
    for _ in range(halvings):
        middle = (low + high) / 2
        if meets(middle):
            low = middle
        else:
            high = middle
    return tried


def best_rate(tried: Sequence[tuple[float, Outcome]]) -> float:
    """The highest rate that met; 0 when none did."""
    return max((rate for rate, outcome in tried if outcome.exit_code == 0), default=0.0)
