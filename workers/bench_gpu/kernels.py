"""Attention alone: decodes against copying memory, prefill against a large product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from workers.attention.backend import AttentionBackend, AttentionSpec, LayerCache
from workers.attention.meta import StepMeta
from workers.attention.registry import BACKENDS, make_attention
from workers.bench_gpu.measures import (
    Measurement,
    attention_operations,
    causal_pairs,
    gigabytes_per_second,
    teraflops,
    time_rounds,
)

_ON_GPU = ("flash", "triton", "torch")


@dataclass(frozen=True, slots=True)
class Batch:
    """`sequences` of `count` new tokens each, after `context` tokens in the cache."""

    sequences: int
    count: int
    context: int

    def __str__(self) -> str:
        return f"{self.sequences} x {self.count} after {self.context}"


@dataclass(frozen=True, slots=True)
class KernelSuite:
    """What is measured. copy_bytes, product_size: of the card's own best."""

    spec: AttentionSpec
    decodes: tuple[Batch, ...]
    prefills: tuple[Batch, ...]
    copy_bytes: int
    product_size: int
    rounds: int


def copy_bandwidth(suite: KernelSuite) -> float:
    """GB/s read and written while copying on the device."""
    source = torch.ones(suite.copy_bytes, dtype=torch.uint8, device=suite.spec.device)
    target = torch.empty_like(source)
    seconds = time_rounds(partial(target.copy_, source), suite.spec.device, suite.rounds)
    return gigabytes_per_second(2 * suite.copy_bytes, seconds)


def product_rate(suite: KernelSuite) -> float:
    """TFLOP/s of a large square product in the dtype of the suite."""
    size, spec = suite.product_size, suite.spec
    a = torch.randn(size, size, device=spec.device).to(spec.dtype)
    b = torch.randn(size, size, device=spec.device).to(spec.dtype)
    seconds = time_rounds(partial(torch.mm, a, b), spec.device, suite.rounds)
    return teraflops(2 * size**3, seconds)


def bench_kernels(suite: KernelSuite) -> Iterator[Measurement]:
    """Every backend that covers the suite; torch's own operators are what they are to beat."""
    bandwidth, rate = copy_bandwidth(suite), product_rate(suite)
    yield Measurement("card", "device copy", bandwidth, "GB/s")
    yield Measurement("card", f"product of {suite.product_size}", rate, "TFLOP/s")
    for name, block_size in _fitting(suite.spec):
        spec = replace(suite.spec, block_size=block_size)
        backend = make_attention(name, spec)
        label = f"{name}, pages of {block_size}"
        for batch in suite.decodes:
            seconds = _time_batch(backend, batch, suite.rounds)
            value = gigabytes_per_second(_cache_bytes(spec, batch), seconds)
            yield Measurement(f"decode attention, {batch}", label, value, "GB/s", bandwidth)
        for batch in suite.prefills:
            seconds = _time_batch(backend, batch, suite.rounds)
            pairs = batch.sequences * causal_pairs(batch.count, batch.context)
            work = attention_operations(spec.num_heads, spec.head_dim, pairs)
            value = teraflops(work, seconds)
            yield Measurement(f"prefill attention, {batch}", label, value, "TFLOP/s", rate)


def _fitting(spec: AttentionSpec) -> Iterator[tuple[str, int]]:
    """(backend, page size): the configured size, else 256, which most FlashAttentions take."""
    for name in _ON_GPU:
        for block_size in (spec.block_size, 256):
            if BACKENDS[name].objection(replace(spec, block_size=block_size)) is None:
                yield name, block_size
                break


def _cache_bytes(spec: AttentionSpec, batch: Batch) -> int:
    """What a decode has to read: every key and value once."""
    tokens = batch.sequences * (batch.context + batch.count)
    return 2 * tokens * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize


def _time_batch(backend: AttentionBackend, batch: Batch, rounds: int) -> list[float]:
    query, cache, meta = attention_inputs(backend.spec, batch)
    backend.plan(meta)
    run = partial(backend.run, query, cache, torch.empty_like(query))
    return time_rounds(run, backend.spec.device, rounds)


def attention_inputs(
    spec: AttentionSpec, batch: Batch
) -> tuple[torch.Tensor, LayerCache, StepMeta]:
    """Random queries and pages, the pages of a sequence scattered over the cache."""
    device, seqs = spec.device, batch.sequences
    length = batch.context + batch.count
    blocks = -(-length // spec.block_size)
    order = torch.randperm(seqs * blocks, device=device) + 1
    pages = (len(order) + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
    total = seqs * batch.count

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.float32).to(spec.dtype)

    def integers(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32)

    bounds = integers(torch.arange(0, total + 1, batch.count, device=device))
    meta = StepMeta(
        num_seqs=seqs,
        num_tokens=total,
        num_decodes=seqs if batch.count == 1 else 0,
        max_q=batch.count,
        max_k=length,
        cu_seqlens_q=bounds,
        seqused_k=torch.full((seqs,), length, dtype=torch.int32, device=device),
        block_table=integers(order.view(seqs, blocks)),
        slot_mapping=torch.full((total,), -1, dtype=torch.int32, device=device),
        positions=torch.zeros(total, dtype=torch.int32, device=device),
        logits_index=bounds[1:] - 1,
    )
    query = random(total, spec.num_heads, spec.head_dim)
    return query, LayerCache(random(*pages), random(*pages)), meta
