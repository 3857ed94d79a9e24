"""Drawing from the whole vocabulary: inverse transform sampling in two levels."""

from __future__ import annotations

import torch
from torch.nn import functional

_BLOCK = 256
"""Tokens per block. A row is padded to whole blocks, which also keeps every row on a vector
boundary: its rounding then cannot depend on how many rows stand before it."""


def block_weights(
    scores: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp((score - peak) / temperature) in fp32, [rows, blocks, 256], 0 in the padding, and the
    fp64 running sum over the blocks, [rows, blocks]; its last column is the row's total.

    scores: [rows, vocab] fp32, peaks: [rows] fp32 row maxima, temperature: [rows] fp64.
    """
    rows, vocab = scores.shape
    shifted = scores - peaks[:, None]
    shifted /= temperature.to(torch.float32)[:, None]
    padding = -vocab % _BLOCK
    if padding:
        shifted = functional.pad(shifted, (0, padding), value=float("-inf"))
    weights = shifted.exp_().view(rows, -1, _BLOCK)
    # A sum of 256 is exact enough in fp32; that of the hundreds of blocks is not.
    return weights, weights.sum(-1).to(torch.float64).cumsum(-1)


def draw_unfiltered(
    scores: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> list[int]:
    """The first id, in the order of ids, whose cumulative probability exceeds the uniform.

    uniforms: [rows] fp64 in [0, 1). The other arguments as for `block_weights`.
    """
    weights, cumulative = block_weights(scores, peaks, temperature)
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    row_index = torch.arange(len(scores), device=scores.device)
    inside = weights[row_index, block[:, 0]].to(torch.float64)
    running = inside.cumsum(-1)
    offset = _first_above(running, target - before)
    # Rounding may leave the target just above a block's own sum; its last possible token is meant.
    last = _BLOCK - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(offset, last))[:, 0].tolist()


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per row the first column whose value exceeds the target, else the last column. [rows, 1]"""
    found = torch.searchsorted(cumulative, target, right=True)
    return found.clamp(max=cumulative.shape[1] - 1)
