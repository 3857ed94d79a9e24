"""Element-wise passes of a decoder layer, each as one call, so that a backend can fuse them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class FusedOps(Protocol):
    """What a layer does besides products and attention. Tensors are contiguous."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension. x: [rows, width], weight: [width] in x's
        dtype or in fp32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add x to `residual` in place and return the norm of the sum. x: [rows, width]."""

    def norm_heads(self, heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """The rms_norm of the leading heads, in place, each head by itself.

        heads: [T, heads, head_dim]. weight: [normed heads, head_dim] in heads' dtype or in fp32.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, gate | up] -> silu(gate) * up, [rows, width]."""

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, gate | up] -> gelu(gate) * up, [rows, width]; gelu by tanh."""


class TorchOps:
    """On torch's operators, for every device and dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype == x.dtype:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def norm_heads(self, heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        normed = heads[:, : len(weight)]
        unit = functional.rms_norm(normed.float(), normed.shape[-1:], None, eps)
        normed.copy_(unit.mul_(weight))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)
