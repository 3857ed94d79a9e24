"""The attention contract on a card, for every backend that may serve there."""

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
from workers.checkpoint.rope import RopeScaling
from workers.layers.rotary import Rotary

CASES = [
    Case("torch", "cuda", torch.float32, 2e-5),
    Case("torch", "cuda", torch.bfloat16, 3e-2),
    Case("torch", "cuda", torch.float16, 5e-3),
    Case("triton", "cuda", torch.float32, 2e-5),
    Case("triton", "cuda", torch.bfloat16, 3e-2),
    Case("triton", "cuda", torch.float16, 5e-3),
    Case("flash", "cuda", torch.bfloat16, 3e-2),
    Case("flash", "cuda", torch.float16, 5e-3),
]
DECODES = [Sequence(1, n - 1) for n in (1, 37, 256, 257, 3000, 1500, 16)]


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    return request.param


def shaped(case: Case, **sizes) -> Shape:
    """Pages of 16, or of 256 where only a FlashAttention that wants those is installed."""
    shape = Shape(**sizes)
    if BACKENDS[case.backend].objection(make_spec(case, shape)) is None:
        return shape
    return replace(shape, block_size=256)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3), (8, 1), (32, 8)], ids=str)
@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_shared_heads(case, heads, sequences):
    check(case, shaped(case, heads=heads[0], kv_heads=heads[1]), sequences)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_head_sizes(case, head_dim, sequences):
    check(case, shaped(case, head_dim=head_dim), sequences)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_page_sizes(case, block_size):
    check(case, Shape(block_size=block_size), [*MIXED, *DECODES])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_lengths_around_edges(case, length):
    decode, chunk, prefill = Sequence(1, length - 1), Sequence(5, length), Sequence(length, 0)
    check(case, shaped(case), [decode, decode, chunk, prefill])
    check(case, shaped(case), [decode])


def test_long_chunk(case):
    check(case, shaped(case), [Sequence(1, 100), Sequence(500, 700)])


@pytest.mark.parametrize("window", [1, 17, 300])
@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_windows(case, window, sequences):
    """FlashAttention reads what a window hides and weighs it with 0, so there it must be finite;
    in a running engine it is: what was computed before the window moved on."""
    shape = shaped(case, window=window)
    backend = make_backend(case, shape)
    step = build_step(case, shape, sequences)
    if case.backend == "flash":
        for pages in step.cache:
            pages.nan_to_num_(nan=1.0)
    out = run_step(backend, step, window).double()
    expected = dense_oracle(shape, sequences, step)
    torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)


def test_soft_cap(case):
    check(case, shaped(case, softcap=3.0), MIXED)
    check(case, shaped(case, softcap=3.0), DECODES)


def test_padding_tokens_disturb_nobody(case):
    check(case, shaped(case), MIXED, padding=6)
    check(case, shaped(case), DECODES, padding=3)


def test_rotation_and_write_in_one_pass(case):
    shape = shaped(case, heads=9, kv_heads=3)
    backend = make_backend(case, shape)
    step = build_step(case, shape, MIXED, padding=4)
    device = torch.device("cuda")
    heads = torch.randn(step.meta.num_tokens, 15, shape.head_dim, device=device).to(case.dtype)
    rotary = Rotary(RopeScaling(theta=1e4), shape.head_dim, device)
    results = []
    for each in (backend, TorchAttention(make_spec(case, shape))):
        cache = LayerCache(step.cache.keys.clone(), step.cache.values.clone())
        each.plan(step.meta)
        angles = rotary.angles(step.meta.positions, each.angle_dtype())
        query = each.rotate_and_write(heads, angles, cache)
        results.append([query, *(pages[1:].nan_to_num(7.0) for pages in cache)])
    for computed, expected in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, atol=case.tolerance, rtol=case.tolerance)


def test_a_captured_step_serves_another(case):
    """One launch, captured over padded sizes, replayed after the buffers were written anew."""
    shape = shaped(case, heads=8, kv_heads=2)
    backend = make_backend(case, shape)
    if not backend.capabilities.graph_safe:
        pytest.skip("not promised")
    longest = [Sequence(1, 2999)] * 4
    other = [Sequence(1, n - 1) for n in (700, 1, 2000, 17)]
    captured, later = (build_step(case, shape, s, seed=i) for i, s in enumerate((longest, other)))
    # As in the worker, where buffers stay and what they hold changes.
    captured.cache.keys.nan_to_num_(nan=0.0)
    out = torch.full_like(captured.query, torch.nan)
    with torch.inference_mode():
        backend.plan(captured.meta)

        def step() -> None:
            backend.write_kv(captured.key, captured.value, captured.cache)
            backend.run(captured.query, captured.cache, out)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        width = later.meta.block_table.shape[1]
        captured.meta.block_table[:, :width].copy_(later.meta.block_table)
        captured.meta.seqused_k.copy_(later.meta.seqused_k)
        captured.meta.slot_mapping.copy_(later.meta.slot_mapping)
        for target, source in zip(captured.cache, later.cache, strict=True):
            target[: len(source)].copy_(source)
        for name in ("query", "key", "value"):
            getattr(captured, name).copy_(getattr(later, name))
        graph.replay()
    expected = dense_oracle(shape, other, later)
    computed = out.cpu().double()
    torch.testing.assert_close(computed, expected, atol=case.tolerance, rtol=case.tolerance)


def test_the_first_choice_works():
    from workers.attention.registry import make_attention

    case = Case("auto", "cuda", torch.bfloat16, 3e-2)
    backend = make_attention("auto", make_spec(case, Shape()))
    step = build_step(case, Shape(), MIXED)
    expected = dense_oracle(Shape(), MIXED, step)
    out = run_step(backend, step).double()
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)
