"""Attention on own Triton kernels: any page size, windows, soft cap, split-KV decodes."""

from __future__ import annotations

from typing import ClassVar

import torch

from workers.attention.backend import AttentionBackend, AttentionSpec, Capabilities, LayerCache
from workers.attention.meta import StepMeta
from workers.attention.triton_tiling import (
    LEAST_DOT,
    Tiling,
    choose_splits,
    chunk_tiling,
    decode_tiling,
    power_of_two,
)
from workers.attention.triton_writer import (
    INTERPRET_VARIABLE,
    TritonWriter,
    compiling,
    interpreted,
    load_kernels,
    missing_triton,
    page_strides,
)
from workers.layers.rotary import RotaryAngles

_INTERPRETED_PROCESSORS = 8
"""What the interpreter takes for the size of the GPU: small, but decodes do get split."""


class TritonAttention(AttentionBackend):
    """One launch per layer for a mixed batch; two for decodes that are split."""

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes={
            "cuda": frozenset({torch.float32, torch.bfloat16, torch.float16}),
            # Interpreted only. Products of bf16 are garbage there (Triton 3.9).
            "cpu": frozenset({torch.float32, torch.float16}),
        },
        head_dims=frozenset(range(8, 257, 8)),
        windows=True,
        softcap=True,
        graph_safe=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        """Runs a step of one token, which compiles. Raises ConfigError where that fails."""
        super().__init__(spec)
        self._group = spec.num_heads // spec.num_kv_heads
        self._chunks, self._decodes = chunk_tiling(spec), decode_tiling(spec)
        self._processors = _processors(spec.device)
        self._meta: StepMeta | None = None
        self._writer = TritonWriter(spec)
        with compiling("attention kernels"):
            self._mixed = load_kernels("mixed")
            self._split = load_kernels("split")
            self._try()

    @classmethod
    def objection(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type == "cpu" and not interpreted():
            return f"device must be cuda, got cpu (or {INTERPRET_VARIABLE}=1, for tests)"
        return super().objection(spec) or missing_triton()

    def plan(self, meta: StepMeta) -> None:
        self._meta = meta

    def angle_dtype(self) -> torch.dtype:
        return self._writer.angle_dtype

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> None:
        self._writer.write(key, value, cache, self._planned().slot_mapping)

    def rotate_and_write(
        self, heads: torch.Tensor, angles: RotaryAngles, cache: LayerCache
    ) -> torch.Tensor:
        return self._writer.rotate_and_write(heads, angles, cache, self._planned().slot_mapping)

    def run(
        self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, window: int = 0
    ) -> None:
        meta, spec = self._planned(), self.spec
        splits = 1
        if meta.max_q == 1:
            seen = min(meta.max_k, window) if window else meta.max_k
            splits = choose_splits(meta.num_seqs, spec.num_kv_heads, seen, self._processors)
        if splits > 1:
            self._run_split(meta, query, cache, out, window, splits)
        else:
            self._run_mixed(meta, query, cache, out, window)

    def _run_mixed(
        self,
        meta: StepMeta,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        window: int,
    ) -> None:
        tiling = self._decodes if meta.max_q == 1 else self._chunks
        units = meta.num_tokens // (tiling.rows // self._group) + meta.num_seqs
        self._mixed.mixed_kernel[units, self.spec.num_kv_heads](
            out,
            query,
            *cache,
            meta.block_table,
            meta.cu_seqlens_q,
            meta.seqused_k,
            meta.num_seqs,
            *out.stride()[:2],
            *query.stride()[:2],
            *page_strides(cache),
            meta.block_table.stride(0),
            self.spec.scale,
            self.spec.softcap,
            **self._constants(tiling, window),
        )

    def _run_split(
        self,
        meta: StepMeta,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        window: int,
        splits: int,
    ) -> None:
        spec, seqs = self.spec, meta.num_seqs
        # Not kept from step to step: what a graph captures must belong to its own memory pool.
        parts = (seqs, spec.num_heads, splits)
        partial = query.new_empty((*parts, spec.head_dim), dtype=torch.float32)
        statistics = query.new_empty((*parts, 2), dtype=torch.float32)
        constants = self._constants(self._decodes, window)
        self._split.split_kernel[seqs, spec.num_kv_heads, splits](
            partial,
            statistics,
            query,
            *cache,
            meta.block_table,
            meta.cu_seqlens_q,
            meta.seqused_k,
            *query.stride()[:2],
            *page_strides(cache),
            meta.block_table.stride(0),
            spec.scale,
            spec.softcap,
            SPLITS=splits,
            **constants,
        )
        self._split.reduce_kernel[seqs, spec.num_heads](
            out,
            partial,
            statistics,
            meta.cu_seqlens_q,
            *out.stride()[:2],
            SPLITS=splits,
            HEAD_DIM=spec.head_dim,
            PADDED_DIM=constants["PADDED_DIM"],
        )

    def _constants(self, tiling: Tiling, window: int) -> dict[str, int | bool]:
        spec = self.spec
        return {
            "WINDOW": window,
            "CAPPED": spec.softcap > 0,
            "GROUP": self._group,
            "ROWS": tiling.rows,
            "BLOCK_SIZE": spec.block_size,
            "TILE": tiling.keys,
            "HEAD_DIM": spec.head_dim,
            "PADDED_DIM": max(LEAST_DOT, power_of_two(spec.head_dim)),
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }

    def _try(self) -> None:
        """A step of one token: slot 0 of block 1."""
        spec = self.spec

        def integers(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=spec.device)

        slots, table = integers(spec.block_size), integers(1).view(1, 1)
        one, bounds = integers(1), integers(0, 1)
        self.plan(StepMeta(1, 1, 1, 1, 1, bounds, one, table, slots, integers(0), integers(0)))
        pages = (2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        zeros = torch.zeros(pages, dtype=spec.dtype, device=spec.device)
        cache = LayerCache(zeros, zeros)
        query = torch.zeros(1, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        self.run(query, cache, torch.empty_like(query))
        self._meta = None

    def _planned(self) -> StepMeta:
        if self._meta is None:
            raise RuntimeError("no step was planned")
        return self._meta


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return _INTERPRETED_PROCESSORS
