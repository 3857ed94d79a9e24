"""Who stores keys and values where the attention kernels only read."""

from __future__ import annotations

from typing import Protocol

import torch

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionSpec, LayerCache
from workers.attention.triton_writer import TritonWriter, missing_triton
from workers.layers.rotary import RotaryAngles, rotate


class KVWriter(Protocol):
    """Stores at slots [T], int32; -1 is padding. angle_dtype: what it wants angles in."""

    angle_dtype: torch.dtype

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        """See AttentionBackend.write_kv."""

    def rotate_and_write(
        self, heads: torch.Tensor, angles: RotaryAngles, cache: LayerCache, slots: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionBackend.rotate_and_write."""


class TorchWriter:
    """On torch's operators. Padding goes to slot 0, in the null block."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self.angle_dtype = spec.dtype

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        # Computed anew for every layer: a captured launch must read the slots of its own step.
        # index_copy_ takes 64-bit indices only.
        index = slots.clamp(min=0).to(torch.int64)
        cache.keys.flatten(0, 1).index_copy_(0, index, key)
        cache.values.flatten(0, 1).index_copy_(0, index, value)

    def rotate_and_write(
        self, heads: torch.Tensor, angles: RotaryAngles, cache: LayerCache, slots: torch.Tensor
    ) -> torch.Tensor:
        queries = self._spec.num_heads
        rotated = queries + self._spec.num_kv_heads
        query_key = rotate(heads[:, :rotated], angles)
        self.write(query_key[:, queries:], heads[:, rotated:], cache, slots)
        return query_key[:, :queries]


def make_writer(spec: AttentionSpec) -> KVWriter:
    """Triton's where it works: one launch instead of eight."""
    if spec.device.type != "cuda" or missing_triton() is not None:
        return TorchWriter(spec)
    try:
        return TritonWriter(spec)
    except ConfigError:
        # It has logged why.
        return TorchWriter(spec)
