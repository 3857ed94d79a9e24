"""Sizes of the Triton kernels' programs and grids. Chosen by shared memory and by counting, not by
measuring: `make bench-gpu` says what a card makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from workers.attention.backend import AttentionSpec

LEAST_DOT = 16
"""tl.dot takes no smaller side."""
_PROGRAMS_PER_PROCESSOR = 4
_KEYS_PER_SPLIT = 256
"""A part shorter than this costs more to launch and to put together than it saves."""
_MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tiling:
    """rows: query rows (queries x heads of a KV head) of a program. keys: per turn of its loop."""

    rows: int
    keys: int
    warps: int
    stages: int


def chunk_tiling(spec: AttentionSpec) -> Tiling:
    """For steps with chunks. Sizes follow from shared memory: two tiles of K and V beside Q."""
    rows = max(64, power_of_two(spec.num_heads // spec.num_kv_heads))
    wide = spec.head_dim * spec.dtype.itemsize > 256
    return Tiling(rows, 32 if wide else 64, 4, 2)


def decode_tiling(spec: AttentionSpec) -> Tiling:
    """For single tokens: as few rows as a product takes, since memory is what is waited for."""
    rows = max(LEAST_DOT, power_of_two(spec.num_heads // spec.num_kv_heads))
    wide = spec.head_dim * spec.dtype.itemsize > 256
    return Tiling(rows, 32 if wide else 64, 4, 3)


def choose_splits(num_seqs: int, num_kv_heads: int, max_k: int, processors: int) -> int:
    """Parts per sequence, a power of two: enough programs for `processors`, none too short.

    Depends on what the host knows of the padded step only, so a captured launch fits every step.
    """
    wanted = max(1, processors * _PROGRAMS_PER_PROCESSOR // (num_seqs * num_kv_heads))
    splits = min(wanted, -(-max_k // _KEYS_PER_SPLIT), _MOST_SPLITS)
    return 1 << (splits.bit_length() - 1)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
