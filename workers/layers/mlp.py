"""Gated feed-forward layer (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

import torch

from workers.layers.fused import FusedOps
from workers.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        """gate_up: hidden -> [gate | up]; down: intermediate -> hidden."""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor, ops: FusedOps) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        return self._down(ops.silu_mul(self._gate_up(x)))
