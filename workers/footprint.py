"""What an engine of a configuration would take, and what there is, before anything loads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.config import WorkerConfig, blocks_for
from workers import memory
from workers.executors import check_config
from workers.models.registry import local_parameters
from workers.parallel.collectives import Shard
from workers.placement import dtype_name
from workers.resolved import resolve


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one rank, in bytes; ranks of a group take the same. free_bytes: on the rank's device, now.
    gpus: that this machine has. max_model_len, num_blocks: as settled.
    heads, kv_heads: of the whole model."""

    device: str
    dtype: str
    ranks: int
    weight_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    heads: int
    kv_heads: int
    free_bytes: int
    gpus: int

    @property
    def kv_bytes(self) -> int:
        """With the null block."""
        return (self.num_blocks + 1) * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def rank_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def longest_sequence(self) -> int:
        """Prompt and output tokens of the longest request that can ever be served."""
        return min(self.max_model_len, self.kv_tokens)

    def sequences(self, tokens: int) -> int:
        """How many sequences of this length have their KV in one engine at a time."""
        return self.num_blocks // blocks_for(tokens, self.block_size)


def footprint(config: WorkerConfig, host_blocks: int = 0) -> Footprint:
    """Raises what loading would raise (see workers.executors.check_config)."""
    settled = check_config(config, host_blocks)
    shard = Shard(0, config.tensor_parallel_size)
    chosen = resolve(settled, host_blocks, shard)
    try:
        return Footprint(
            device=str(chosen.device),
            dtype=dtype_name(chosen.dtype),
            ranks=shard.size,
            weight_bytes=local_parameters(chosen.checkpoint, shard) * chosen.dtype.itemsize,
            block_bytes=chosen.shape.bytes_per_block,
            block_size=chosen.shape.block_size,
            num_blocks=chosen.num_blocks,
            max_model_len=chosen.max_model_len,
            heads=chosen.checkpoint.config.num_heads,
            kv_heads=chosen.checkpoint.config.num_kv_heads,
            free_bytes=memory.free_memory(chosen.device),
            gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        )
    finally:
        chosen.checkpoint.close()
