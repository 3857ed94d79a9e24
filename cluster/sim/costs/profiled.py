"""Step times from a table of measured operation times, one row per token count and TP degree.

The table is the one that Vidur (MLSys 2024) profiles: milliseconds per operation of one layer. What
it lacks (attention over the cache, the output head, launch overhead) comes from the roofline.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import ConfigError
from cluster.core.plan import StepPlan
from cluster.sim.costs.base import StepSize, size_of
from cluster.sim.costs.hardware import Hardware
from cluster.sim.costs.presets import BF16_BYTES, ModelShape
from cluster.sim.costs.roofline import ALL_REDUCE_LATENCY_S, BlockMoves, StepWork
from cluster.sim.traces import DATA, opened

SHIPPED_TIMES = DATA / "h100_llama2_7b_layer_times.csv.gz"

LAYER_OPERATIONS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
"""Once per layer. `add` stands for both residual sums: kernels fuse the other into a norm."""
STEP_OPERATIONS = ("emb",)
"""Once per step."""


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """Seconds of the operations that depend on nothing but the number of tokens in the step.

    tokens: measured counts, rising. layer_s: sum over one layer. step_s: once per step.
    """

    tokens: list[int]
    layer_s: list[float]
    step_s: list[float]

    def at(self, tokens: int, layers: int) -> float:
        """Linear between measured counts, in proportion beyond the most, flat below the least."""
        counts = self.tokens
        place = bisect_left(counts, tokens)
        if place == 0:
            return self._measured(0, layers)
        if place == len(counts):
            return self._measured(place - 1, layers) * tokens / counts[-1]
        low, high = counts[place - 1], counts[place]
        share = (tokens - low) / (high - low)
        below, above = self._measured(place - 1, layers), self._measured(place, layers)
        return below + (above - below) * share

    def _measured(self, place: int, layers: int) -> float:
        return self.layer_s[place] * layers + self.step_s[place]


def read_times(path: Path, tensor_parallel: int) -> OperationTimes:
    """Medians of that TP degree; several measurements of one count are averaged."""
    layer: defaultdict[int, list[float]] = defaultdict(list)
    step: defaultdict[int, list[float]] = defaultdict(list)
    degrees: set[int] = set()
    with opened(path) as text:
        for number, row in enumerate(csv.DictReader(text), start=2):
            degree = int(_cell(path, number, row, "num_tensor_parallel_workers"))
            degrees.add(degree)
            if degree != tensor_parallel:
                continue
            tokens = int(_cell(path, number, row, "num_tokens"))
            for operations, found in ((LAYER_OPERATIONS, layer), (STEP_OPERATIONS, step)):
                names = [f"time_stats.{operation}.median" for operation in operations]
                found[tokens].append(sum(_cell(path, number, row, name) for name in names) * 1e-3)
    if not layer:
        known = ", ".join(map(str, sorted(degrees))) or "none"
        raise ConfigError(
            f"{path.name} has no times for tensor parallel {tensor_parallel}: {known}"
        )
    counts = sorted(layer)
    mean = {t: sum(v) / len(v) for t, v in layer.items()}
    return OperationTimes(
        counts, [mean[t] for t in counts], [sum(step[t]) / len(step[t]) for t in counts]
    )


class ProfiledCost:
    """Measured times of everything but attention; roofline for attention, head and all-reduce."""

    def __init__(
        self,
        times: OperationTimes,
        hardware: Hardware,
        model: ModelShape,
        tensor_parallel: int = 1,
        block_size: int = 16,
    ) -> None:
        work = StepWork.of(model, tensor_parallel)
        self._times = times
        self._layers = model.layers
        self._pair_s = work.flops_per_pair / hardware.compute_rate
        self._position_s = work.bytes_per_position / hardware.memory_rate
        head = model.vocab * model.hidden / tensor_parallel
        self._head_s = BF16_BYTES * head / hardware.memory_rate
        self._head_s_per_row = 2 * head / hardware.compute_rate
        self._link_s_per_token = work.link_bytes_per_token / hardware.link
        self._fixed_s = hardware.overhead_s + work.all_reduces * ALL_REDUCE_LATENCY_S
        self._moves = BlockMoves.of(hardware, work, block_size)
        self._cached: dict[int, float] = {}

    def seconds(self, plan: StepPlan) -> float:
        return self.of_size(size_of(plan), len(plan.rows)) + self._moves.seconds(plan)

    def decode_seconds(self, sequences: int, positions: int) -> float:
        return self.of_size(StepSize(sequences, positions, 2 * positions), sequences)

    def of_size(self, size: StepSize, rows: int) -> float:
        """rows: logits are computed once per row, whatever its tokens."""
        tokens, positions, pairs = size
        linear_s = self._cached.get(tokens)
        if linear_s is None:
            linear_s = self._times.at(tokens, self._layers) + tokens * self._link_s_per_token
            self._cached[tokens] = linear_s
        attention_s = max(pairs * self._pair_s, positions * self._position_s)
        head_s = max(rows * self._head_s_per_row, self._head_s)
        return linear_s + attention_s + head_s + self._fixed_s


def _cell(path: Path, number: int, row: dict[str, str], column: str) -> float:
    text = row.get(column)
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(
            f"{path.name} line {number}, column {column!r}: must be a number >= 0, got {text!r}"
        )
    return value
