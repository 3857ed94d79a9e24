"""Triton as an optional package, and the kernels that store keys and values."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionSpec, LayerCache
from workers.attention.triton_tiling import power_of_two
from workers.layers.rotary import RotaryAngles

logger = logging.getLogger(__name__)

INTERPRET_VARIABLE = "TRITON_INTERPRET"


class TritonWriter:
    """Stores keys and values in pages; for backends whose kernels only read."""

    angle_dtype = torch.float32

    def __init__(self, spec: AttentionSpec) -> None:
        """Stores a token once, which compiles. Raises ConfigError where that fails."""
        self._spec = spec
        with compiling("writing kernels"):
            self._write = load_kernels("write")
            pages = (1, spec.block_size, spec.num_kv_heads, spec.head_dim)
            page = torch.zeros(pages, dtype=spec.dtype, device=spec.device)
            slot = torch.zeros(1, dtype=torch.int32, device=spec.device)
            self.write(page[0, :1], page[0, :1], LayerCache(page, page), slot)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        """key, value: [T, kv_heads, head_dim], last dimension contiguous. slots: [T], -1 none."""
        spec = self._spec
        self._write.write_kernel[len(slots), spec.num_kv_heads](
            key,
            value,
            *cache,
            slots,
            *key.stride()[:2],
            *value.stride()[:2],
            *page_strides(cache),
            BLOCK_SIZE=spec.block_size,
            HEAD_DIM=spec.head_dim,
            PADDED_DIM=power_of_two(spec.head_dim),
        )

    def rotate_and_write(
        self, heads: torch.Tensor, angles: RotaryAngles, cache: LayerCache, slots: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionBackend.rotate_and_write; the angles may have any dtype."""
        spec = self._spec
        query = heads.new_empty(len(heads), spec.num_heads, spec.head_dim)
        self._write.rotate_kernel[len(heads), heads.shape[1]](
            heads,
            angles.cos,
            angles.sin,
            query,
            *cache,
            slots,
            *page_strides(cache),
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            BLOCK_SIZE=spec.block_size,
            HALF_DIM=spec.head_dim // 2,
            PADDED_HALF=power_of_two(spec.head_dim // 2),
        )
        return query


def missing_triton() -> str | None:
    """Why Triton's kernels cannot be had, or None."""
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed (it comes with torch's CUDA build; else: pip install triton)"
        )
    return None


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Turns whatever a compiler and a driver can raise into ConfigError, and logs it: who is
    not asked for Triton by name goes on without."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines()
        message = (
            f"Triton's {what} cannot be compiled here "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'})"
        )
        logger.warning("%s", message)
        raise ConfigError(message) from error


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on the CPU: for tests."""
    return os.environ.get(INTERPRET_VARIABLE) == "1"


def page_strides(cache: LayerCache) -> tuple[int, ...]:
    """Of K, then of V: elements from block to block, slot to slot, head to head."""
    return (*cache.keys.stride()[:3], *cache.values.stride()[:3])


def load_kernels(name: str) -> ModuleType:
    """Imported on first use: Triton is optional, and the environment decides how it runs."""
    return importlib.import_module(f"workers.attention.triton_kernels.{name}")
