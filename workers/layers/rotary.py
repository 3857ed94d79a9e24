"""Rotary position embedding (Su et al., 2021), half-split layout as in Hugging Face Llama."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from workers.checkpoint.rope import RopeScaling


class RotaryAngles(NamedTuple):
    """cos and sin of a step's positions, [tokens, 1, head_dim / 2] each, shared by all layers."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """Angles for positions, and their application to query and key heads."""

    def __init__(self, rope: RopeScaling, head_dim: int, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._turn = _turn_on_host if device.type == "cpu" else _turn

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> RotaryAngles:
        """positions: [tokens], any integer type. The angle is computed in fp32, then cast."""
        cos, sin = self._turn(positions, self._inverse_frequencies)
        return RotaryAngles(cos.to(dtype), sin.to(dtype))


def _turn(positions: torch.Tensor, frequencies: torch.Tensor) -> RotaryAngles:
    """[tokens], [head_dim / 2] -> fp32."""
    angle = positions.to(torch.float32)[:, None, None] * frequencies
    return RotaryAngles(angle.cos(), angle.sin())


def _turn_on_host(positions: torch.Tensor, frequencies: torch.Tensor) -> RotaryAngles:
    """The same by numpy. torch's cos goes through MKL to OpenMP even for one token, and OpenMP's
    threads spin for 5 ms after it: a fifth of a decode step's time, taken from the kernels."""
    angle = positions.numpy().astype(np.float32)[:, None, None] * frequencies.numpy()
    return RotaryAngles(torch.from_numpy(np.cos(angle)), torch.from_numpy(np.sin(angle)))


def rotate(heads: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Rotate each head's pairs (i, i + head_dim / 2). heads: [tokens, heads, head_dim] -> same."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    torch.mul(first, angles.cos, out=out[..., :half]).addcmul_(second, angles.sin, value=-1)
    torch.mul(second, angles.cos, out=out[..., half:]).addcmul_(first, angles.sin)
    return out


def inverse_frequencies(rope: RopeScaling, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] fp32: theta^(-2i/head_dim), rescaled as `rope.kind` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: torch.Tensor, rope: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    band = rope.high_freq_factor - rope.low_freq_factor
    share_kept = (rope.original_max_position / wavelengths - rope.low_freq_factor) / band
    stretched = frequencies / rope.factor
    between = (1 - share_kept) * stretched + share_kept * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, stretched, frequencies)
    medium = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(medium, between, scaled)
