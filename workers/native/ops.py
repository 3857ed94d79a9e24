"""The fused element-wise passes on the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workers.native.bindings import Kernels


class NativeOps:
    """FusedOps for contiguous CPU tensors of the kernels' dtype; see there for the shapes."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self._kernels.rms_norm[weight.dtype](
            x.data_ptr(),
            None,
            weight.data_ptr(),
            eps,
            rows,
            width,
            None,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        kept = residual.data_ptr()
        self._kernels.rms_norm[weight.dtype](
            x.data_ptr(),
            kept,
            weight.data_ptr(),
            eps,
            rows,
            width,
            kept,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def norm_heads(self, heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        tokens, count, head_dim = heads.shape
        self._kernels.norm_heads[weight.dtype](
            heads.data_ptr(), weight.data_ptr(), eps, tokens, count, len(weight), head_dim
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _gate(self._kernels.silu_mul, gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _gate(self._kernels.gelu_mul, gate_up)


def _gate(kernel: Callable[..., None], gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    kernel(gate_up.data_ptr(), rows, width, out.data_ptr(), torch.get_num_threads())
    return out
