"""Gated feed-forward layer (SwiGLU; Shazeer, 2020)."""

from __future__ import annotations

import torch
from torch.nn import functional

from workers.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        """gate_up: hidden -> [gate | up]; down: intermediate -> hidden."""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate).mul_(up))
