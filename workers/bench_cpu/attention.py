"""Attention alone: the compiled kernels against gather + SDPA and against reading as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from workers.attention.backend import AttentionSpec, LayerCache
from workers.attention.meta import StepMeta
from workers.attention.registry import BACKENDS
from workers.bench_cpu.turns import DTYPES, Comparison, compare, reader, take_turns

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`sequences` of `count` new tokens each, after `context` tokens in the cache."""

    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    count: int
    context: int

    def __str__(self) -> str:
        kind = "decode" if self.count == 1 else f"chunk of {self.count}"
        shape = f"{self.heads}/{self.kv_heads} x {self.head_dim}"
        return f"{kind}, {self.sequences} x {self.context}, heads {shape}"


CASES = (
    AttentionCase(9, 3, 64, 16, 1, 512),
    AttentionCase(8, 4, 64, 32, 1, 512),
    AttentionCase(32, 8, 128, 8, 1, 1024),
    AttentionCase(9, 3, 64, 1, 256, 0),
    AttentionCase(8, 4, 64, 1, 512, 1024),
    AttentionCase(32, 8, 128, 1, 256, 1024),
)


def bench_attention(case: AttentionCase, dtype: str, rounds: int) -> list[Comparison]:
    """Native against gather + SDPA, and for decodes against reading as many bytes once."""
    query, cache, meta = _attention_inputs(case, DTYPES[dtype])
    out = torch.empty_like(query)
    spec = AttentionSpec(
        case.heads,
        case.kv_heads,
        case.head_dim,
        BLOCK_SIZE,
        case.head_dim**-0.5,
        DTYPES[dtype],
        torch.device("cpu"),
    )
    backends = {name: BACKENDS[name](spec) for name in ("native", "torch")}
    ways: dict[str, Callable[[], object]] = {}
    for name, backend in backends.items():
        backend.plan(meta)
        ways[name] = partial(backend.run, query, cache, out)
    ways["read"] = reader(cache.keys.nbytes + cache.values.nbytes)
    times = take_turns(ways, rounds)
    decode = case.count == 1
    results = [compare(str(case), dtype, times, ("native", "torch"), 0.5 if decode else 0.75)]
    if decode:
        results.append(compare(str(case), dtype, times, ("native", "read"), 2.0))
    return results


def _attention_inputs(
    case: AttentionCase, dtype: torch.dtype
) -> tuple[torch.Tensor, LayerCache, StepMeta]:
    """Random queries and pages, the pages of a sequence scattered over the cache."""
    length = case.context + case.count
    blocks = -(-length // BLOCK_SIZE)
    order = torch.randperm(case.sequences * blocks) + 1
    pages = (len(order) + 1, BLOCK_SIZE, case.kv_heads, case.head_dim)
    cache = LayerCache(torch.randn(pages).to(dtype), torch.randn(pages).to(dtype))
    total = case.sequences * case.count
    ends = torch.arange(0, total + 1, case.count, dtype=torch.int32)
    meta = StepMeta(
        num_seqs=case.sequences,
        num_tokens=total,
        num_decodes=case.sequences if case.count == 1 else 0,
        max_q=case.count,
        max_k=length,
        cu_seqlens_q=ends,
        seqused_k=torch.full((case.sequences,), length, dtype=torch.int32),
        block_table=order.view(case.sequences, blocks).to(torch.int32),
        slot_mapping=torch.full((total,), -1, dtype=torch.int32),
        positions=torch.zeros(total, dtype=torch.int32),
        logits_index=ends[1:] - 1,
    )
    return torch.randn(total, case.heads, case.head_dim).to(dtype), cache, meta
