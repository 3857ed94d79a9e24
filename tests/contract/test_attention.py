"""What every attention backend must do; see attention_cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cluster.core.errors import ConfigError
from tests.contract.attention_cases import (
    CASES,
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
from workers.attention.registry import BACKENDS, make_attention
from workers.native.levels import LEVEL_VARIABLE, usable_levels


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


WINDOWS = [1, 8, 16, 17, 100]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [(4, 2), (9, 3)], ids=str)
def test_sliding_window(case, window, heads):
    check(case, Shape(heads=heads[0], kv_heads=heads[1], window=window), MIXED)


@pytest.mark.parametrize("window", WINDOWS)
def test_contexts_around_the_edge_of_the_window(case, window):
    edges = [max(0, window + d) for d in (-2, -1, 0, 1, 63, 64, 65)]
    decodes = [Sequence(1, context) for context in edges]
    chunks = [Sequence(count, context) for context in edges for count in (2, 70)]
    check(case, Shape(window=window), [*decodes, *chunks, Sequence(window, 0), Sequence(300, 0)])


def test_layers_with_and_without_a_window_take_turns(case):
    shape = Shape(window=20)
    backend = make_backend(case, shape)
    step = build_step(case, Shape(), MIXED)
    for window in (20, 0, 20, 0):
        out = run_step(backend, step, window).double()
        expected = dense_oracle(replace(shape, window=window), MIXED, step)
        torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("window", [0, 17])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_cap(case, softcap, window):
    check(case, Shape(softcap=softcap, window=window), MIXED)


def test_scores_of_any_finite_size(case):
    """A rounding error of the largest score is nothing beside it, but much beside 1."""
    if case.dtype is torch.float16:
        pytest.skip("its numbers end before")
    backend = make_backend(case, Shape())
    step = build_step(case, Shape(), MIXED)
    step.query.mul_(1e11)
    expected = dense_oracle(Shape(), MIXED, step)
    computed = run_step(backend, step)[: len(expected)].double()
    torch.testing.assert_close(computed, expected, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("window", [0, 40])
def test_a_sequence_does_not_feel_its_neighbours(case, window):
    """The same bits alone, in company, and at another place of the batch."""
    if not BACKENDS[case.backend].capabilities.batch_invariant or case.dtype != torch.float32:
        pytest.skip("not promised")
    shape = Shape(window=window)
    backend = make_backend(case, shape)
    step = build_step(case, shape, MIXED)
    together = run_step(backend, step, window)
    bounds = step.meta.cu_seqlens_q.tolist()
    for row, sequence in enumerate(MIXED):
        part = slice(bounds[row], bounds[row + 1])
        meta = replace(
            step.meta,
            num_seqs=1,
            num_tokens=sequence.count,
            num_decodes=int(sequence.count == 1),
            max_q=sequence.count,
            max_k=sequence.length,
            cu_seqlens_q=torch.tensor([0, sequence.count], dtype=torch.int32, device=case.device),
            seqused_k=step.meta.seqused_k[row : row + 1],
            block_table=step.meta.block_table[row : row + 1],
            slot_mapping=step.meta.slot_mapping[part],
            positions=step.meta.positions[part],
        )
        alone = replace(
            step, meta=meta, query=step.query[part], key=step.key[part], value=step.value[part]
        )
        assert torch.equal(run_step(backend, alone, window), together[part])


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
