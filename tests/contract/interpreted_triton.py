"""The Triton kernels in Triton's interpreter. Run by test_triton in a process of its own: Triton
reads TRITON_INTERPRET once, when something first imports it.

Shapes are small: the interpreter needs milliseconds for what a GPU does in microseconds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.contract.attention_cases import (
    MIXED,
    Case,
    Sequence,
    Shape,
    build_step,
    check,
    dense_oracle,
    make_backend,
    make_spec,
    run_step,
)
from workers.attention.backend import LayerCache
from workers.attention.registry import BACKENDS
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton_backend import TritonAttention
from workers.checkpoint.rope import RopeScaling
from workers.layers.rotary import Rotary

FP32 = Case("triton", "cpu", torch.float32, 2e-5)
FP16 = Case("triton", "cpu", torch.float16, 5e-3)
SMALL = [
    *(Sequence(1, 0), Sequence(1, 37), Sequence(1, 130)),
    *(Sequence(7, 0), Sequence(33, 16), Sequence(1, 5), Sequence(20, 91)),
]
DECODES = [Sequence(1, length - 1) for length in (1, 530, 16, 257)]
"""Split, and the shorter ones into parts of which some are empty."""


@pytest.fixture(params=[FP32, FP16], ids=str)
def case(request) -> Case:
    return request.param


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (8, 1)], ids=str)
def test_mixed_batch_with_shared_heads(case, heads):
    check(case, Shape(heads=heads[0], kv_heads=heads[1]), MIXED)


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (8, 1)], ids=str)
def test_split_decodes_with_shared_heads(case, heads):
    check(case, Shape(heads=heads[0], kv_heads=heads[1]), DECODES)


@pytest.mark.parametrize("head_dim", [8, 96, 128, 256])
def test_head_sizes(head_dim):
    shape = Shape(heads=2, kv_heads=1, head_dim=head_dim)
    check(FP32, shape, SMALL)
    check(FP32, shape, DECODES)


@pytest.mark.parametrize("block_size", [1, 24, 256])
def test_any_page_size(block_size):
    shape = Shape(heads=2, kv_heads=1, block_size=block_size)
    check(FP32, shape, SMALL)
    check(FP32, shape, DECODES)


@pytest.mark.parametrize("window", [1, 17, 64, 300])
def test_windows(window):
    shape = Shape(heads=2, kv_heads=1, window=window)
    check(FP32, shape, SMALL)
    check(FP32, shape, DECODES)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_cap(softcap):
    shape = Shape(heads=2, kv_heads=1, softcap=softcap)
    check(FP32, shape, SMALL)
    check(FP32, replace(shape, window=300), DECODES)


@pytest.mark.parametrize("length", [1, 16, 17, 64, 65])
def test_lengths_around_edges_of_pages_and_tiles(length):
    decode, chunk, prefill = Sequence(1, length - 1), Sequence(5, length), Sequence(length, 0)
    check(FP32, Shape(heads=2, kv_heads=1), [decode, decode, chunk, prefill])
    check(FP32, Shape(heads=2, kv_heads=1), [decode])


def test_padding_tokens_disturb_nobody():
    check(FP32, Shape(), SMALL, padding=6)
    check(FP32, Shape(), DECODES, padding=3)


@pytest.mark.parametrize("sequences", [SMALL, DECODES], ids=["mixed", "decodes"])
def test_a_padded_launch_serves_a_smaller_step(sequences):
    """As a captured graph is replayed: more sequences, tokens and keys than there are; those
    that are not have no token and no key."""
    shape = Shape(heads=2, kv_heads=1)
    backend = make_backend(FP32, shape)
    step = build_step(FP32, shape, sequences, padding=5)
    spare = 4
    meta = step.meta
    padded = replace(
        meta,
        num_seqs=meta.num_seqs + spare,
        max_k=4 * meta.max_k,
        cu_seqlens_q=torch.cat([meta.cu_seqlens_q, meta.cu_seqlens_q[-1:].expand(spare)]),
        seqused_k=torch.nn.functional.pad(meta.seqused_k, (0, spare)),
        block_table=torch.nn.functional.pad(meta.block_table, (0, 0, 0, spare)),
    )
    out = run_step(backend, replace(step, meta=padded))
    expected = dense_oracle(shape, sequences, step)
    torch.testing.assert_close(out[: len(expected)].double(), expected, atol=2e-5, rtol=2e-5)
    assert out[len(expected) :].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 96])
def test_rotation_and_write_in_one_pass(case, head_dim):
    """Against torch's operators, in every slot of the cache and every query."""
    shape = Shape(heads=9, kv_heads=3, head_dim=head_dim)
    step = build_step(case, shape, SMALL, padding=4)
    heads = torch.randn(step.meta.num_tokens, 15, head_dim).to(case.dtype)
    rotary = Rotary(RopeScaling(theta=1e4), head_dim, torch.device("cpu"))
    results = []
    for backend in (make_backend(case, shape), TorchAttention(make_spec(case, shape))):
        cache = LayerCache(step.cache.keys.clone(), step.cache.values.clone())
        angles = rotary.angles(step.meta.positions, torch.float32)
        if backend.name == "torch":
            angles = rotary.angles(step.meta.positions, backend.angle_dtype())
        backend.plan(step.meta)
        query = backend.rotate_and_write(heads, angles, cache)
        # Padding is written to the null block by one and nowhere by the other.
        results.append([query, cache.keys[1:].nan_to_num(7.0), cache.values[1:].nan_to_num(7.0)])
    for computed, expected in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, atol=case.tolerance, rtol=case.tolerance)
    assert torch.equal(results[0][2], results[1][2])


def test_writes_touch_only_their_slots(case):
    shape = Shape()
    backend = make_backend(case, shape)
    step = build_step(case, shape, SMALL, padding=2)
    before = step.cache.keys.clone()
    run_step(backend, step)
    own = step.meta.slot_mapping >= 0
    slots = step.meta.slot_mapping[own].long()
    flat, old = step.cache.keys.flatten(0, 1), before.flatten(0, 1)
    assert torch.equal(flat[slots], step.key[own])
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(flat[untouched].nan_to_num(7.0), old[untouched].nan_to_num(7.0))


def test_auto_leaves_the_interpreter_alone():
    from workers.attention.registry import candidates

    spec = make_spec(FP32, Shape())
    assert TritonAttention.objection(spec) is None
    assert BACKENDS["triton"] not in candidates("auto", spec)
