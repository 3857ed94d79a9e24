"""Gated feed-forward layer (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.layers.fused import FusedOps
from workers.layers.linear import Linear

Gate = Callable[[FusedOps, torch.Tensor], torch.Tensor]
"""[rows, gate | up] -> activation(gate) * up, [rows, width]."""


def silu_gate(ops: FusedOps, gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU."""
    return ops.silu_mul(gate_up)


def gelu_gate(ops: FusedOps, gate_up: torch.Tensor) -> torch.Tensor:
    """GeGLU, by tanh."""
    return ops.gelu_mul(gate_up)


GATES: dict[str, Gate] = {"silu": silu_gate, "gelu_tanh": gelu_gate}
"""By ModelConfig.activation."""


class GatedMLP:
    """down(activation(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear, gate: Gate = silu_gate) -> None:
        """gate_up: hidden -> [gate | up]; down: intermediate -> hidden."""
        self.gate_up = gate_up
        self.down = down
        self.gate = gate

    def __call__(self, x: torch.Tensor, ops: FusedOps) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate(ops, self.gate_up(x)))
