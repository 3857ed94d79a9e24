"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the mean square is taken in fp32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """weight: [hidden]."""
        self._weight = weight
        self._eps = eps
        self._shape = (weight.shape[0],)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, hidden] -> the same shape and dtype."""
        return functional.rms_norm(x, self._shape, self._weight, self._eps)
