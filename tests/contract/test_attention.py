"""What every attention backend must do, against a dense oracle in fp64.

A new backend joins by one entry in CASES.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from cluster.core.errors import ConfigError
from workers.attention.backend import AttentionBackend, AttentionSpec, LayerCache
from workers.attention.meta import StepMeta
from workers.attention.registry import BACKENDS, make_attention
from workers.native.levels import LEVEL_VARIABLE, LEVELS, usable_levels


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


@pytest.fixture(params=CASES, ids=str)
def case(request, monkeypatch) -> Case:
    case = request.param
    if case.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if case.level:
        monkeypatch.setenv(LEVEL_VARIABLE, case.level)
        if not usable_levels() or usable_levels()[0].name != case.level:
            pytest.skip(f"this CPU has no {case.level}")
    return case


def make_spec(case: Case, shape: Shape) -> AttentionSpec:
    return AttentionSpec(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        scale=shape.head_dim**-0.5,
        dtype=case.dtype,
        device=torch.device(case.device),
    )


def make_backend(case: Case, shape: Shape) -> AttentionBackend:
    spec = make_spec(case, shape)
    objection = BACKENDS[case.backend].objection(spec)
    if objection is not None:
        pytest.skip(objection)
    return make_attention(case.backend, spec)


def build_step(
    case: Case, shape: Shape, sequences: list[Sequence], padding: int = 0, seed: int = 0
) -> Step:
    """Pages in random order; every slot that no context token is written to holds NaN."""
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
        cached = slot[: sequence.context].long()
        cache.keys.flatten(0, 1)[cached] = key[: sequence.context]
        cache.values.flatten(0, 1)[cached] = value[: sequence.context]
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


def run_step(backend: AttentionBackend, step: Step) -> torch.Tensor:
    out = torch.full_like(step.query, torch.nan)
    with torch.inference_mode():
        backend.plan(step.meta)
        backend.write_kv(step.key, step.value, step.cache)
        backend.run(step.query, step.cache, out)
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
            seen = sequence.context + offset + 1
            k = key[:seen].double().repeat_interleave(group, 1)
            v = value[:seen].double().repeat_interleave(group, 1)
            scores = torch.einsum("khd,hd->hk", k, query[begin + offset])
            weights = (scores * shape.head_dim**-0.5).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(rows)


def check(case: Case, shape: Shape, sequences: list[Sequence], padding: int = 0) -> None:
    backend = make_backend(case, shape)
    step = build_step(case, shape, sequences, padding)
    out = run_step(backend, step)
    expected = dense_oracle(shape, sequences, step)
    computed = out[: len(expected)].double()
    torch.testing.assert_close(computed, expected, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3), (8, 1)], ids=str)
def test_mixed_batch_with_shared_heads(case, heads):
    check(case, Shape(heads=heads[0], kv_heads=heads[1]), MIXED)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_sizes(case, head_dim):
    check(case, Shape(head_dim=head_dim), MIXED)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes(case, block_size):
    check(case, Shape(block_size=block_size), MIXED)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_lengths_around_block_edges(case, length):
    decode, chunk, prefill = Sequence(1, length - 1), Sequence(5, length), Sequence(length, 0)
    check(case, Shape(), [decode, decode, chunk, prefill])


def test_decodes_of_very_unequal_lengths(case):
    lengths = [1, 3000, 2, 1500, 40, 1499, 700, 16]
    check(case, Shape(), [Sequence(1, length - 1) for length in lengths])


def test_single_sequence_of_one_token(case):
    check(case, Shape(), [Sequence(1, 0)])


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_share_the_work(case, threads):
    """The same bits, whoever does which part: in fp32 a replay must not depend on it."""
    shape = Shape(heads=9, kv_heads=3)
    backend = make_backend(case, shape)
    before = torch.get_num_threads()
    outs = []
    try:
        for count in (1, threads, threads, 1):
            torch.set_num_threads(count)
            step = build_step(case, shape, MIXED)
            outs.append(run_step(backend, step))
    finally:
        torch.set_num_threads(before)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=case.tolerance, rtol=case.tolerance)
        if case.backend == "native":
            assert torch.equal(out, outs[0])


def test_padding_tokens_disturb_nobody(case):
    check(case, Shape(), MIXED, padding=6)


def test_chunks_continue_where_the_last_one_ended(case):
    """The cache that three chunks leave behind serves the decode that follows."""
    shape = Shape()
    backend = make_backend(case, shape)
    whole = build_step(case, shape, [Sequence(50, 0)], seed=3)
    expected = dense_oracle(shape, [Sequence(50, 0)], whole)
    for begin, end in ((0, 20), (20, 37), (37, 49), (49, 50)):
        meta = replace(
            whole.meta,
            num_tokens=end - begin,
            num_decodes=int(end - begin == 1),
            max_q=end - begin,
            max_k=end,
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32, device=case.device),
            seqused_k=torch.tensor([end], dtype=torch.int32, device=case.device),
            slot_mapping=whole.meta.slot_mapping[begin:end],
            positions=whole.meta.positions[begin:end],
        )
        part = replace(
            whole,
            meta=meta,
            query=whole.query[begin:end],
            key=whole.key[begin:end],
            value=whole.value[begin:end],
        )
        out = run_step(backend, part).double()
        torch.testing.assert_close(
            out, expected[begin:end], atol=case.tolerance, rtol=case.tolerance
        )


def test_writes_touch_only_their_slots(case):
    shape = Shape()
    backend = make_backend(case, shape)
    step = build_step(case, shape, MIXED)
    before = step.cache.keys.clone()
    run_step(backend, step)
    slots = step.meta.slot_mapping.long()
    flat, old = step.cache.keys.flatten(0, 1), before.flatten(0, 1)
    assert torch.equal(flat[slots], step.key)
    untouched = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
    untouched[slots] = False
    assert torch.equal(flat[untouched].nan_to_num(7.0), old[untouched].nan_to_num(7.0))


def test_unknown_backend_is_refused_with_the_choices():
    spec = make_spec(CASES[0], Shape())
    with pytest.raises(ConfigError, match=r"attention_backend must be one of .*'torch'.*'magic'"):
        make_attention("magic", spec)


def test_uncovered_dtype_is_refused_with_limit_and_value():
    spec = replace(make_spec(CASES[0], Shape()), dtype=torch.float16)
    for name in ("torch", "auto"):
        with pytest.raises(ConfigError, match=r"dtype on cpu .*bfloat16.*got float16"):
            make_attention(name, spec)


def test_auto_takes_the_first_that_fits():
    assert make_attention("auto", make_spec(CASES[0], Shape())).name in BACKENDS
