"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch

from workers.layers.fused import FusedOps


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the mean square is taken in fp32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [hidden], in the model's dtype or in fp32."""
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor, ops: FusedOps) -> torch.Tensor:
        """x: [rows, hidden] -> the same shape and dtype."""
        return ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: torch.Tensor, residual: torch.Tensor, ops: FusedOps) -> torch.Tensor:
        """Add x to `residual` in place; the norm of the sum. [rows, hidden] each."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class HeadNorm:
    """RMSNorm of query and key heads, each by itself (Henry et al., 2020)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [query and key heads, head_dim], in the model's dtype or in fp32."""
        self.weight = weight
        self.eps = eps

    def __call__(self, heads: torch.Tensor, ops: FusedOps) -> None:
        """heads: [T, query | key | value heads, head_dim]; the values stay as they are."""
        ops.norm_heads(heads, self.weight, self.eps)
