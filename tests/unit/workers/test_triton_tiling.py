"""Sizes of the Triton kernels' grids and programs."""

from __future__ import annotations

import pytest
import torch

from workers.attention.backend import AttentionSpec
from workers.attention.triton_tiling import (
    choose_splits,
    chunk_tiling,
    decode_tiling,
    power_of_two,
)


def spec(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, 16, 1.0, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("number", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (96, 128), (128, 128)]
)
def test_power_of_two(number, power):
    assert power_of_two(number) == power


@pytest.mark.parametrize(
    ("num_seqs", "max_k", "splits"),
    [
        (1, 100_000, 32),  # the most
        (1, 1000, 4),  # parts of 256 keys at least
        (1, 257, 2),
        (1, 256, 1),
        (1, 1, 1),
        (16, 100_000, 4),  # 132 processors x 4 programs over 16 x 8
        (64, 100_000, 1),
        (1000, 100_000, 1),
    ],
)
def test_splits_fill_the_card_and_no_more(num_seqs, max_k, splits):
    assert choose_splits(num_seqs, 8, max_k, 132) == splits


@pytest.mark.parametrize("group", [1, 3, 4, 8, 32, 71])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_holds_a_whole_group(group, head_dim, dtype):
    shape = spec(group * 2, 2, head_dim, dtype)
    for tiling in (chunk_tiling(shape), decode_tiling(shape)):
        assert tiling.rows >= group
        assert tiling.rows >= 16
        assert power_of_two(tiling.rows) == tiling.rows
        assert power_of_two(tiling.keys) == tiling.keys
