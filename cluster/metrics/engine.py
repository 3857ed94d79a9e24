"""The metrics of an engine: a histogram of step times; the rest is read where it is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cluster.metrics import process
from cluster.metrics.facts import EngineFacts
from cluster.metrics.family import Family, Kind, Label, Lines
from cluster.metrics.histogram import Histogram

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

INFO = Family(
    "headway_engine_info",
    _G,
    "",
    "Always 1; names the engine, its model and the version of Headway.",
    (Label("engine_id"), Label("model"), Label("version")),
)
STEP = Family("headway_engine_step_seconds", _H, "seconds", "Time of a step on the executor.")


class _Read(NamedTuple):
    """A family whose values are read at a scrape, in the order of its label values."""

    family: Family
    of: Callable[[EngineFacts], tuple[float, ...]]


def _total(name: str, unit: str, text: str, of: Callable[[EngineFacts], float]) -> _Read:
    return _Read(Family(f"headway_engine_{name}_total", _C, unit, text), lambda f: (of(f),))


def _gauge(name: str, unit: str, text: str, of: Callable[[EngineFacts], float]) -> _Read:
    return _Read(Family(f"headway_engine_{name}", _G, unit, text), lambda f: (of(f),))


def _blocks(facts: EngineFacts) -> tuple[float, ...]:
    load, cached = facts.load, facts.cached_blocks
    return (load.blocks_total - load.blocks_free, cached, max(0, load.blocks_free - cached))


_READ = (
    _total("steps", "", "Steps planned.", lambda f: f.counters.steps),
    _total(
        "computed_tokens",
        "tokens",
        "Positions whose KV was computed: prompts, outputs and what is computed again.",
        lambda f: f.counters.computed_tokens,
    ),
    _total(
        "emitted_tokens", "tokens", "Output tokens emitted.", lambda f: f.counters.emitted_tokens
    ),
    _total(
        "recomputed_tokens",
        "tokens",
        "Positions thrown away by preemptions and pauses, to be computed again; over "
        "computed_tokens it is the recompute tax.",
        lambda f: f.counters.recomputed_tokens,
    ),
    _total(
        "admitted_tokens",
        "tokens",
        "Tokens to be computed by sequences that came in, prefix hits included.",
        lambda f: f.counters.admitted_tokens,
    ),
    _total(
        "prefix_hit_tokens",
        "tokens",
        "Those of admitted_tokens that the prefix cache had; the quotient is the hit rate.",
        lambda f: f.counters.prefix_hit_tokens,
    ),
    _Read(
        Family(
            "headway_engine_preemptions_total",
            _C,
            "",
            "Sequences whose blocks were taken: for want of blocks, or for a larger priority.",
            (Label("cause", ("blocks", "priority")),),
        ),
        lambda f: (
            f.counters.preemptions - f.counters.rank_preemptions,
            f.counters.rank_preemptions,
        ),
    ),
    _total(
        "pauses", "", "Sequences paused because their reader is slow.", lambda f: f.counters.pauses
    ),
    _total(
        "stalled_seconds",
        "seconds",
        "Time that preempted sequences waited to come in again, summed over sequences.",
        lambda f: f.counters.stalled_s,
    ),
    _total(
        "swapped_blocks",
        "blocks",
        "KV blocks moved to host memory instead of being thrown away.",
        lambda f: f.counters.swapped_blocks,
    ),
    _total(
        "padded_tokens",
        "tokens",
        "Rows computed for members of a batch that are over (static and dynamic batching).",
        lambda f: f.counters.padded_tokens,
    ),
    _total(
        "wasted_rows",
        "rows",
        "Rows computed for sequences that had stopped or left meanwhile.",
        lambda f: f.counters.wasted_rows,
    ),
    _total(
        "failures",
        "",
        "Sequences that the model gave no token for.",
        lambda f: f.counters.failures,
    ),
    _gauge("running", "sequences", "Sequences in the running batch.", lambda f: f.load.running),
    _gauge(
        "running_limit",
        "sequences",
        "Sequences that may run at once (max_num_seqs).",
        lambda f: f.max_num_seqs,
    ),
    _gauge("waiting", "sequences", "Sequences without a place in it.", lambda f: f.load.waiting),
    _gauge(
        "waiting_tokens",
        "tokens",
        "Tokens that these have to compute before their next one.",
        lambda f: f.load.waiting_tokens,
    ),
    _Read(
        Family(
            "headway_engine_kv_blocks",
            _G,
            "blocks",
            "KV blocks: held by sequences, free but with a prefix that may be hit, free and empty.",
            (Label("state", ("held", "cached", "empty")),),
        ),
        _blocks,
    ),
    _gauge(
        "kv_use_ratio",
        "0 to 1",
        "Share of the KV blocks that sequences hold.",
        lambda f: f.load.kv_use,
    ),
    _gauge(
        "budget_tokens", "tokens", "Token budget in force: of the newest step.", lambda f: f.granted
    ),
    _gauge(
        "budget_limit_tokens",
        "tokens",
        "The largest that it may be (max_num_batched_tokens).",
        lambda f: f.budget_limit,
    ),
    _gauge(
        "itl_objective_seconds",
        "seconds",
        "Gap between two tokens that the budget is to hold; 0 for a fixed budget.",
        lambda f: f.itl_objective_s,
    ),
    _gauge("routers", "", "Routers connected.", lambda f: f.routers),
    _gauge("draining", "0 or 1", "1 while it takes nothing new.", lambda f: int(f.draining)),
    _gauge(
        "no_step_seconds",
        "seconds",
        "Since work has been there without a step getting done.",
        lambda f: f.stalled_s,
    ),
)

FAMILIES: tuple[Family, ...] = (INFO, STEP, *(read.family for read in _READ), *process.FAMILIES)


class EngineMetrics:
    """Implements engine.loop.StepObserver; text() may be called from any thread.

    facts: reads the engine. known: engine_id, model, version.
    """

    def __init__(self, facts: Callable[[], EngineFacts], known: dict[str, str]) -> None:
        self._facts = facts
        self._steps = Histogram()
        self.stepped = self._steps.observe
        self._info = Lines(INFO, known)
        self._step_lines = Lines(STEP)
        self._lines = [(Lines(read.family), read.of) for read in _READ]
        self._process = process.ProcessLines()

    def text(self) -> str:
        """A scrape."""
        facts = self._facts()
        parts = [self._info.numbers([1]), self._step_lines.histogram(self._steps)]
        parts += [lines.numbers(of(facts)) for lines, of in self._lines]
        parts.append(self._process.text())
        return "".join(parts)
