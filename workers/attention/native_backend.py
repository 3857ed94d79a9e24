"""Attention on the compiled CPU kernels, which read the pages where they are."""

from __future__ import annotations

from ctypes import byref
from typing import ClassVar

import torch

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionBackend, AttentionSpec, Capabilities, LayerCache
from workers.attention.meta import StepMeta
from workers.layers.rotary import RotaryAngles
from workers.native import bindings
from workers.native.build import BuildError
from workers.native.layers import NativeStep
from workers.native.ops import NativeOps

_HEAD_DIM_MULTIPLE = 16
_MAX_HEAD_DIM = 256


class NativeAttention(AttentionBackend):
    """Decodes in one pass over the cache; chunks in tiles, on the matrix unit if there is one."""

    name: ClassVar[str] = "native"
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes={"cpu": bindings.DTYPES},
        head_dims=frozenset(range(_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM + 1, _HEAD_DIM_MULTIPLE)),
        windows=True,
        softcap=True,
        batch_invariant=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        """Compiles the kernels on first use. Raises ConfigError where that fails."""
        super().__init__(spec)
        try:
            self._kernels = bindings.load_kernels(spec.dtype)
        except BuildError as error:
            raise ConfigError(f"attention backend {self.name!r}: {error}") from error
        self.ops = NativeOps(self._kernels)
        self._shape = bindings.HeadShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            spec.scale,
            spec.softcap,
        )
        self._step = bindings.StepView()
        self._meta: StepMeta | None = None

    @classmethod
    def objection(cls, spec: AttentionSpec) -> str | None:
        return super().objection(spec) or bindings.unavailable()

    def plan(self, meta: StepMeta) -> None:
        self._meta = meta
        self._step = bindings.StepView(
            meta.block_table.data_ptr(),
            meta.cu_seqlens_q.data_ptr(),
            meta.seqused_k.data_ptr(),
            meta.block_table.stride(0),
            meta.num_seqs,
            meta.num_decodes,
            torch.get_num_threads(),
        )

    def angle_dtype(self) -> torch.dtype:
        return torch.float32

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> None:
        slots = self._slots()
        self._kernels.write_kv(
            byref(self._shape),
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            slots.data_ptr(),
            len(slots),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
        )

    def rotate_and_write(
        self, heads: torch.Tensor, angles: RotaryAngles, cache: LayerCache
    ) -> torch.Tensor:
        slots, spec = self._slots(), self.spec
        query = heads.new_empty(len(heads), spec.num_heads, spec.head_dim)
        self._kernels.rotate_and_write(
            byref(self._shape),
            heads.data_ptr(),
            angles.cos.data_ptr(),
            angles.sin.data_ptr(),
            slots.data_ptr(),
            len(slots),
            query.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            self._step.threads,
        )
        return query

    def run(
        self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, window: int = 0
    ) -> None:
        self._kernels.attend(
            byref(self._step),
            byref(self._shape),
            window,
            query.data_ptr(),
            query.stride(0),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            out.data_ptr(),
        )

    def native_step(self) -> NativeStep:
        return NativeStep(self._shape, self._step, self._slots())

    def _slots(self) -> torch.Tensor:
        if self._meta is None:
            raise RuntimeError("no step was planned")
        return self._meta.slot_mapping
