"""Element-wise passes of a decoder layer, each as one call, so that a backend can fuse them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class FusedOps(Protocol):
    """What a layer does besides products and attention. Tensors are contiguous."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension. x: [rows, width], weight: [width]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add x to `residual` in place and return the norm of the sum. x: [rows, width]."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, gate | up] -> silu(gate) * up, [rows, width]."""


class TorchOps:
    """On torch's operators, for every device and dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
