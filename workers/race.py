"""Drawing as a race: every token gets a random arrival time, and the first one wins.

Token i with weight w_i arrives at E_i / w_i, where E_i is exponentially distributed; the first to
arrive is i with probability w_i / sum(w) (the Gumbel-max trick, Maddison et al. 2014, in the form
that needs one logarithm per token). E_i depends on (seed, output index, token id) alone.

Inverse transform sampling needs a sum over the vocabulary, and a rounding error anywhere in it
moves every boundary: with ten thousand likely tokens one draw in a hundred comes out otherwise
when the batch is cut otherwise. Here only an error as large as the lead of the winner matters.
"""

from __future__ import annotations

import torch

from workers.native import bindings

_SPREAD = 0x9E3779B1 - (1 << 32)
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
_BITS = 31
_BLOCK = 128
"""Divides the vocabulary of every Llama and Qwen; others take the slower way."""


def exponentials(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed noise, fp32, the shape of `ids` broadcast over the rows.

    keys: [rows, 2] int32, the halves of counter_key. ids: [vocab] or [rows, n] token ids.
    The hash is murmur3's finaliser, once per half of the key; 31 bits, of which the small values,
    those that win races, keep their full relative precision in fp32.
    """
    bits = (ids.to(torch.int32) * _SPREAD) ^ keys[:, :1]
    bits = _mix(_mix(bits) ^ keys[:, 1:])
    share = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * (1.0 / (1 << _BITS))
    return share.neg_().log1p_().neg_()


def draw_unfiltered(
    scores: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """One id per row, [rows] int64, each with probability proportional to exp(score / temperature).

    scores: [rows, vocab], any float type. peaks: [rows] fp32 row maxima. temperature: [rows] fp64.
    keys: as for `exponentials`.
    """
    kernels = bindings.kernels_for(scores)
    if kernels is not None and scores.is_contiguous():
        return _raced(kernels, scores, peaks, temperature, keys)
    weights = token_weights(scores, peaks, temperature)
    vocabulary = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    weights /= exponentials(keys, vocabulary)
    return largest(weights)[1]


def token_weights(
    scores: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """exp((score - peak) / temperature), [rows, vocab] fp32: 1 for the likeliest token.

    scores: [rows, vocab], any float type.
    """
    shifted = scores.to(torch.float32) - peaks[:, None]
    shifted /= temperature.to(torch.float32)[:, None]
    return shifted.exp_()


def largest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the maximum in fp32 and its lowest id, [rows] each; NaN where the row holds one.

    Without kernels in two levels, because a maximum alone is vectorised (and propagates NaN), one
    with its index is not: 8 times faster on the CPU.
    """
    kernels = bindings.kernels_for(values)
    if kernels is not None and values.is_contiguous():
        return _largest(kernels, values)
    rows, vocab = values.shape
    values = values.to(torch.float32)
    if vocab % _BLOCK:
        peaks, ids = values.max(dim=-1)
        return peaks, ids
    blocks = values.view(rows, -1, _BLOCK)
    peaks, block = blocks.amax(-1).max(dim=-1)
    inside = blocks[torch.arange(rows, device=values.device), block].argmax(-1)
    return peaks, block * _BLOCK + inside


def _largest(kernels: bindings.Kernels, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = values.shape
    peaks = torch.empty(rows, dtype=torch.float32)
    ids = torch.empty(rows, dtype=torch.int32)
    threads = torch.get_num_threads()
    kernels.largest(values.data_ptr(), rows, vocab, peaks.data_ptr(), ids.data_ptr(), threads)
    return peaks, ids.to(torch.int64)


def _raced(
    kernels: bindings.Kernels,
    scores: torch.Tensor,
    peaks: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    rows, vocab = scores.shape
    ids = torch.empty(rows, dtype=torch.int32)
    temperatures = temperature.to(torch.float32).contiguous()
    peaks, keys = peaks.contiguous(), keys.contiguous()
    kernels.race(
        scores.data_ptr(),
        peaks.data_ptr(),
        temperatures.data_ptr(),
        keys.data_ptr(),
        rows,
        vocab,
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return ids.to(torch.int64)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit finaliser. int32 products wrap; its shifts must not carry the sign."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * _MIX_2
    return bits ^ ((bits >> 16) & 0xFFFF)
