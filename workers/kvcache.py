"""The paged KV cache: how many blocks, and the memory for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.config import WorkerConfig, blocks_for
from cluster.core.errors import ConfigError
from workers.attention.backend import LayerCache
from workers.checkpoint.modelconfig import ModelConfig
from workers.parallel.collectives import Shard
from workers.parallel.heads import split_heads

_ALONE = Shard()

MIN_SEQUENCE_TOKENS = 128
"""A cache sized from free memory must hold one sequence of this length, or the model's shorter
limit: with less, no ordinary request could ever finish."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Layout of one layer's K (and V): [num_blocks + 1, block_size, num_kv_heads, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Over all layers, K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


def cache_shape(
    model: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard = _ALONE
) -> CacheShape:
    """The cache of one rank: that of its KV heads."""
    heads = split_heads(model.num_heads, model.num_kv_heads, shard)
    return CacheShape(model.num_layers, heads.kv.size, model.head_dim, block_size, dtype)


def choose_num_blocks(
    config: WorkerConfig, shape: CacheShape, max_model_len: int, free_bytes: int
) -> int:
    """Usable blocks: as configured, else kv_memory_share of `free_bytes`, but never more than
    max_num_seqs sequences of full length could use.

    Raises ConfigError when the configured blocks exceed the free memory, or when the share holds
    not even one short sequence.
    """
    if config.num_blocks is not None:
        needed = (config.num_blocks + 1) * shape.bytes_per_block
        if needed > free_bytes:
            raise ConfigError(
                f"num_blocks {config.num_blocks} needs {needed} bytes "
                f"({shape.bytes_per_block} per block), but only {free_bytes} are free"
            )
        return config.num_blocks
    most = config.max_num_seqs * blocks_for(max_model_len, shape.block_size)
    budget = int(config.kv_memory_share * free_bytes)
    # One block of the budget is the null block.
    num_blocks = min(most, budget // shape.bytes_per_block - 1)
    least = blocks_for(min(max_model_len, MIN_SEQUENCE_TOKENS), shape.block_size)
    if num_blocks < least:
        raise ConfigError(
            f"kv_memory_share {config.kv_memory_share:g} of {free_bytes} free bytes holds "
            f"{max(0, num_blocks)} blocks of {shape.bytes_per_block} bytes, one sequence needs "
            f"at least {least}: raise it, set num_blocks, or use a smaller model"
        )
    return num_blocks


def allocate(shape: CacheShape, num_blocks: int, device: torch.device) -> list[LayerCache]:
    """One cache per layer, with the null block on top of `num_blocks`.

    Filled, not merely reserved: memory that is not there then fails at the start instead of
    killing the process in the middle of serving.
    """
    pages = (num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    with torch.inference_mode():
        return [
            LayerCache(
                torch.zeros(pages, dtype=shape.dtype, device=device),
                torch.zeros(pages, dtype=shape.dtype, device=device),
            )
            for _ in range(shape.num_layers)
        ]
