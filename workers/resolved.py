"""What a configuration means for one model on this machine, settled before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.config import WorkerConfig
from cluster.core.errors import ConfigError
from workers import kvcache, memory
from workers.attention.backend import AttentionSpec
from workers.attention.registry import candidates
from workers.checkpoint.folder import Checkpoint
from workers.kvcache import CacheShape
from workers.models.registry import local_parameters, open_checkpoint
from workers.parallel.collectives import Shard
from workers.parallel.heads import split_heads
from workers.placement import choose_device, choose_dtype, dtype_name

_ALONE = Shard()


@dataclass(frozen=True, slots=True)
class Resolved:
    """What "auto" and None stand for, except the attention backend, which may have to be compiled
    first. num_blocks: as the free memory of this moment allows, the weights taken off. Of a rank of
    a tensor-parallel group, spec, shape and num_blocks are those of its own part."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    spec: AttentionSpec
    shape: CacheShape
    num_blocks: int
    shard: Shard


def resolve(config: WorkerConfig, host_blocks: int, shard: Shard = _ALONE) -> Resolved:
    """Settle the configuration and check it against the model's headers and the free memory.

    On the CPU the ranks of a group share it: rank 0, which settles for all before any of them
    loads, may have its part only.

    Raises ModelError for a folder that cannot be served, ConfigError for a configuration that
    does not fit the model or the machine.
    """
    device = choose_device(config.device)
    checkpoint = open_checkpoint(config.model)
    dtype = choose_dtype(config.dtype, checkpoint, device)
    max_model_len = _max_model_len(config, checkpoint)
    spec = _attention_spec(config, checkpoint, dtype, device, shard)
    candidates(config.attention_backend, spec)
    shape = kvcache.cache_shape(checkpoint.config, config.block_size, dtype, shard)
    left = _check_weights_fit(checkpoint, dtype, device, shard)
    num_blocks = kvcache.choose_num_blocks(config, shape, max_model_len, left)
    _check_host_blocks_fit(host_blocks, shape)
    return Resolved(checkpoint, device, dtype, max_model_len, spec, shape, num_blocks, shard)


def _max_model_len(config: WorkerConfig, checkpoint: Checkpoint) -> int:
    limit = checkpoint.config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len must be at most {limit}, the limit of {checkpoint.folder}, "
            f"got {config.max_model_len}"
        )
    return config.max_model_len


def _check_weights_fit(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, shard: Shard
) -> int:
    """The bytes that the weights leave free. Refuses before loading: a process that outgrows its
    memory is killed without a word."""
    needed = local_parameters(checkpoint, shard) * dtype.itemsize
    free = memory.free_memory(device)
    if device.type == "cpu" and shard.rank == 0:
        free //= shard.size
    if needed > free:
        raise ConfigError(
            f"model {checkpoint.folder} needs {needed} bytes as {dtype_name(dtype)}, but only "
            f"{free} are free on {device}"
        )
    return free - needed


def _check_host_blocks_fit(host_blocks: int, shape: CacheShape) -> None:
    if host_blocks < 0:
        raise ConfigError(f"host_blocks must be at least 0, got {host_blocks}")
    needed, free = host_blocks * shape.bytes_per_block, memory.free_memory(torch.device("cpu"))
    if needed > free:
        raise ConfigError(
            f"host_blocks {host_blocks} needs {needed} bytes of host memory "
            f"({shape.bytes_per_block} per block), but only {free} are free"
        )


def _attention_spec(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
) -> AttentionSpec:
    model = checkpoint.config
    heads = split_heads(model.num_heads, model.num_kv_heads, shard)
    return AttentionSpec(
        num_heads=heads.query.size,
        num_kv_heads=heads.kv.size,
        head_dim=model.head_dim,
        block_size=config.block_size,
        scale=model.attention_scale,
        dtype=dtype,
        device=device,
        windows=model.window_sizes,
        softcap=model.attention_softcap,
    )
