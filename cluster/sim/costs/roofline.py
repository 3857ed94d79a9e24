"""Roofline: a step takes as long as its arithmetic or its memory traffic, whichever is slower.

Williams, Waterman and Patterson, CACM 2009; the counts of a transformer step are those of
"Continuous Batching and Chunked Prefill: Keeping the GPU Full".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.core.errors import ConfigError
from cluster.core.plan import StepPlan
from cluster.sim.costs.base import StepSize, size_of
from cluster.sim.costs.hardware import Hardware, PowerLimit
from cluster.sim.costs.presets import BF16_BYTES, ModelShape

ALL_REDUCES_PER_LAYER = 2
"""After attention's output projection and after the feed-forward (Megatron-LM)."""
ALL_REDUCE_LATENCY_S = 8e-6
"""Of one small all-reduce within a node."""
UNLIMITED = PowerLimit(math.inf)


@dataclass(frozen=True, slots=True)
class StepWork:
    """FLOPs and bytes of a step on one accelerator, as linear forms of its StepSize.

    FLOP = flops_per_token * tokens + flops_per_pair * pairs
    bytes = weight_bytes + bytes_per_token * tokens + bytes_per_position * positions
    link_bytes_per_token: sent to the peers; all_reduces: how often in a step.
    """

    flops_per_token: float
    flops_per_pair: float
    weight_bytes: float
    bytes_per_token: float
    bytes_per_position: float
    link_bytes_per_token: float = 0.0
    all_reduces: int = 0

    @classmethod
    def of(cls, model: ModelShape, tensor_parallel: int = 1) -> StepWork:
        """Every projection and every head split over the group; KV heads cannot be split further.

        A ring all-reduce of n tokens' hidden states sends 2 (t - 1) / t of their bytes.
        """
        check_tensor_parallel(model, tensor_parallel)
        ranks = tensor_parallel
        activations = BF16_BYTES * model.hidden
        all_reduces = ALL_REDUCES_PER_LAYER * model.layers if ranks > 1 else 0
        return cls(
            flops_per_token=2 * model.matmul_params / ranks,
            flops_per_pair=2 * model.layers * model.heads * model.head_dim / ranks,
            weight_bytes=BF16_BYTES * model.matmul_params / ranks,
            bytes_per_token=activations,
            bytes_per_position=model.kv_bytes_per_token / min(ranks, model.kv_heads),
            link_bytes_per_token=all_reduces * activations * 2 * (ranks - 1) / ranks,
            all_reduces=all_reduces,
        )


def check_tensor_parallel(model: ModelShape, ranks: int) -> None:
    if ranks < 1 or model.heads % ranks:
        raise ConfigError(
            f"tensor parallel must divide the {model.heads} heads of {model.name}, got {ranks}"
        )


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Seconds of moving one KV block to or from the host, and of copying it on the accelerator.
    Nothing of it overlaps with the step."""

    swap_s: float
    copy_s: float

    @classmethod
    def of(cls, hardware: Hardware, work: StepWork, block_size: int) -> BlockMoves:
        block_bytes = work.bytes_per_position * block_size
        return cls(block_bytes / hardware.host_link, 2 * block_bytes / hardware.memory_rate)

    def seconds(self, plan: StepPlan) -> float:
        if not (plan.swap_out or plan.swap_in or plan.copies):
            return 0.0
        swapped = len(plan.swap_out) + len(plan.swap_in)
        return swapped * self.swap_s + len(plan.copies) * self.copy_s


class RooflineCost:
    """max(FLOP / compute rate, bytes / memory rate), stretched by the power limit, + overhead."""

    def __init__(self, hardware: Hardware, work: StepWork, block_size: int = 16) -> None:
        self.hardware = hardware
        self.work = work
        # Read once here: this is called for every step of a simulation.
        self._flops_per_token = work.flops_per_token
        self._flops_per_pair = work.flops_per_pair
        self._weight_bytes = work.weight_bytes
        self._bytes_per_token = work.bytes_per_token
        self._bytes_per_position = work.bytes_per_position
        self._compute_rate = hardware.compute_rate
        self._memory_rate = hardware.memory_rate
        power = hardware.power or UNLIMITED
        self._power = power
        self._watts = power.watts
        self._j_per_flop = power.pj_per_flop * 1e-12
        self._j_per_byte = power.pj_per_byte * 1e-12
        self._overhead_s = hardware.overhead_s + work.all_reduces * ALL_REDUCE_LATENCY_S
        self._link_s_per_token = work.link_bytes_per_token / hardware.link
        self._moves = BlockMoves.of(hardware, work, block_size)

    def seconds(self, plan: StepPlan) -> float:
        return self.of_size(size_of(plan)) + self._moves.seconds(plan)

    def decode_seconds(self, sequences: int, positions: int) -> float:
        return self._step_seconds(sequences, positions, 2 * positions)

    def of_size(self, size: StepSize) -> float:
        return self._step_seconds(*size)

    def _step_seconds(self, tokens: int, positions: int, pairs: int) -> float:
        flops = self._flops_per_token * tokens + self._flops_per_pair * pairs
        moved = (
            self._weight_bytes
            + self._bytes_per_token * tokens
            + self._bytes_per_position * positions
        )
        compute_s = flops / self._compute_rate
        memory_s = moved / self._memory_rate
        step_s = compute_s if compute_s > memory_s else memory_s
        if flops * self._j_per_flop + moved * self._j_per_byte > self._watts * step_s:
            step_s = self._capped(flops, moved)
        return step_s + self._overhead_s + self._link_s_per_token * tokens

    def _capped(self, flops: float, moved: float) -> float:
        return capped_seconds(
            flops / self._compute_rate,
            moved / self._memory_rate,
            flops * self._j_per_flop,
            moved * self._j_per_byte,
            self._power,
        )


def capped_seconds(
    compute_s: float, memory_s: float, compute_j: float, memory_j: float, power: PowerLimit
) -> float:
    """Seconds of a step at the highest clock scale s in [min_scale, 1] that the power allows.

    Power(s) = (compute_j s^2 + memory_j) / max(compute_s / s, memory_s) grows with s. Below the
    lowest scale the step is stretched until its energy fits.
    """
    scale = _clock_scale(compute_s, memory_s, compute_j, memory_j, power.watts)
    scale = min(1.0, max(power.min_scale, scale))
    step_s = max(compute_s / scale, memory_s)
    energy_j = compute_j * scale * scale + memory_j
    return max(step_s, energy_j / power.watts)


def _clock_scale(
    compute_s: float, memory_s: float, compute_j: float, memory_j: float, watts: float
) -> float:
    """Where Power(s) meets `watts`; 0 when even a stopped clock draws more."""
    if memory_s > 0 and watts * memory_s > memory_j and compute_j > 0:
        scale = math.sqrt((watts * memory_s - memory_j) / compute_j)
        if compute_s <= scale * memory_s:
            return scale
    # Compute-bound: compute_j s^3 + memory_j s = watts compute_s, rising and convex for s > 0.
    # Newton from the right closes in from above.
    scale = 1.0
    for _ in range(30):
        excess = (compute_j * scale * scale + memory_j) * scale - watts * compute_s
        step = excess / (3 * compute_j * scale * scale + memory_j)
        scale -= step
        if abs(step) < 1e-12:
            break
    return scale
