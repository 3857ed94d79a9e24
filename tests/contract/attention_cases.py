"""Steps for attention backends, and the dense oracle in fp64 that they are held against.

A new backend joins by one entry in CASES.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from workers.attention.backend import AttentionBackend, AttentionSpec, LayerCache
from workers.attention.meta import StepMeta
from workers.attention.registry import BACKENDS, make_attention
from workers.native.levels import LEVELS


@dataclass(frozen=True)
class Case:
    """A backend on a device with a dtype, and how far from the oracle it may be.

    level: instruction set of native kernels."""

    backend: str
    device: str
    dtype: torch.dtype
    tolerance: float
    level: str = ""

    def __str__(self) -> str:
        name = "-".join(filter(None, (self.backend, self.level)))
        return f"{name}-{self.device}-{str(self.dtype)[6:]}"


CASES = [
    Case("torch", "cpu", torch.float32, 2e-5),
    Case("torch", "cpu", torch.bfloat16, 3e-2),
    Case("torch", "cuda", torch.float32, 2e-5),
    Case("torch", "cuda", torch.bfloat16, 3e-2),
    Case("torch", "cuda", torch.float16, 5e-3),
    *(
        Case("native", "cpu", dtype, tolerance, level.name)
        for level in LEVELS
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2))
    ),
]


@dataclass(frozen=True)
class Sequence:
    """`count` new tokens after `context` tokens that are in the cache already."""

    count: int
    context: int

    @property
    def length(self) -> int:
        return self.count + self.context


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0


@dataclass
class Step:
    """A step with its cache, and the dense keys and values that the cache stands for."""

    meta: StepMeta
    cache: LayerCache
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]]


MIXED = [
    Sequence(1, 0),
    Sequence(1, 37),
    Sequence(1, 15),
    Sequence(1, 16),
    Sequence(1, 300),
    Sequence(7, 0),
    Sequence(33, 16),
    Sequence(1, 0),
    Sequence(16, 48),
    Sequence(50, 91),
]


def make_spec(case: Case, shape: Shape) -> AttentionSpec:
    return AttentionSpec(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        scale=shape.head_dim**-0.5,
        dtype=case.dtype,
        device=torch.device(case.device),
        windows=(shape.window,) if shape.window else (),
        softcap=shape.softcap,
    )


def make_backend(case: Case, shape: Shape) -> AttentionBackend:
    spec = make_spec(case, shape)
    objection = BACKENDS[case.backend].objection(spec)
    if objection is not None:
        pytest.skip(objection)
    return make_attention(case.backend, spec)


def first_seen(shape: Shape, position: int) -> int:
    """The first key that the query at `position` sees."""
    return max(0, position + 1 - shape.window) if shape.window else 0


def build_step(
    case: Case, shape: Shape, sequences: list[Sequence], padding: int = 0, seed: int = 0
) -> Step:
    """Pages in random order; every slot that no query of the step may see holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-s.length // shape.block_size) for s in sequences]
    order = (torch.randperm(sum(blocks) + 3, generator=generator) + 1).tolist()
    pages = (len(order) + 1, shape.block_size, shape.kv_heads, shape.head_dim)
    device = torch.device(case.device)
    cache = LayerCache(
        torch.full(pages, torch.nan, dtype=case.dtype),
        torch.full(pages, torch.nan, dtype=case.dtype),
    )

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(case.dtype)

    table = torch.zeros(len(sequences), max(blocks), dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    keys, values, dense = [], [], []
    for row, sequence in enumerate(sequences):
        own = [order.pop() for _ in range(blocks[row])]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        key = random(sequence.length, shape.kv_heads, shape.head_dim)
        value = random(sequence.length, shape.kv_heads, shape.head_dim)
        dense.append((key, value))
        position = torch.arange(sequence.length)
        slot = table[row, position // shape.block_size] * shape.block_size
        slot += position % shape.block_size
        seen = slice(first_seen(shape, sequence.context), sequence.context)
        cached = slot[seen].long()
        cache.keys.flatten(0, 1)[cached] = key[seen]
        cache.values.flatten(0, 1)[cached] = value[seen]
        slots += slot[sequence.context :].tolist()
        positions += position[sequence.context :].tolist()
        keys.append(key[sequence.context :])
        values.append(value[sequence.context :])
    pad = random(padding, shape.kv_heads, shape.head_dim)
    counts = [s.count for s in sequences]
    bounds = [0, *itertools.accumulate(counts)]
    total = bounds[-1] + padding

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    decodes = sum(1 for _ in itertools.takewhile(lambda count: count == 1, counts))
    meta = StepMeta(
        num_seqs=len(sequences),
        num_tokens=total,
        num_decodes=decodes,
        max_q=max(counts),
        max_k=max(s.length for s in sequences),
        cu_seqlens_q=integers(bounds),
        seqused_k=integers([s.length for s in sequences]),
        block_table=table.to(device),
        slot_mapping=integers(slots + [-1] * padding),
        positions=integers(positions + [0] * padding),
        logits_index=integers([end - 1 for end in bounds[1:]]),
    )
    return Step(
        meta,
        LayerCache(cache.keys.to(device), cache.values.to(device)),
        random(total, shape.heads, shape.head_dim).to(device),
        torch.cat([*keys, pad]).to(device),
        torch.cat([*values, pad]).to(device),
        dense,
    )


def run_step(backend: AttentionBackend, step: Step, window: int = 0) -> torch.Tensor:
    out = torch.full_like(step.query, torch.nan)
    with torch.inference_mode():
        backend.plan(step.meta)
        backend.write_kv(step.key, step.value, step.cache)
        backend.run(step.query, step.cache, out, window)
    return out.cpu()


def dense_oracle(shape: Shape, sequences: list[Sequence], step: Step) -> torch.Tensor:
    """Softmax attention written down as in the paper, one query at a time."""
    query = step.query.cpu().double()
    group = shape.heads // shape.kv_heads
    rows = []
    for sequence, (key, value), begin in zip(
        sequences, step.dense, step.meta.cu_seqlens_q.tolist(), strict=False
    ):
        for offset in range(sequence.count):
            position = sequence.context + offset
            seen = slice(first_seen(shape, position), position + 1)
            k = key[seen].double().repeat_interleave(group, 1)
            v = value[seen].double().repeat_interleave(group, 1)
            scores = torch.einsum("khd,hd->hk", k, query[begin + offset]) * shape.head_dim**-0.5
            if shape.softcap:
                scores = shape.softcap * (scores / shape.softcap).tanh()
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
    return torch.stack(rows)


def check(case: Case, shape: Shape, sequences: list[Sequence], padding: int = 0) -> None:
    """The backend, skipped where it declines, against the oracle."""
    backend = make_backend(case, shape)
    step = build_step(case, shape, sequences, padding)
    out = run_step(backend, step, shape.window)
    expected = dense_oracle(shape, sequences, step)
    computed = out[: len(expected)].double()
    torch.testing.assert_close(computed, expected, atol=case.tolerance, rtol=case.tolerance)
