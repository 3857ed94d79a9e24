"""Stand-ins for the FlashAttention packages: their signatures, a check of every argument against
what the real ones demand, and the answer computed densely in fp64.

The signatures were copied from the packages: vllm-flash-attn 2.6.2, flash-attn 2.8.3,
vllm.vllm_flash_attn of vLLM's fork at 03ef28b, torch 2.13. `make test-flash` and the torch test
beside this file compare them with what is installed.
"""

from __future__ import annotations

from types import ModuleType

import torch


def check_pages(pages: torch.Tensor, table: torch.Tensor, multiple: int, seqs: int) -> None:
    assert pages.dim() == 4
    assert pages.stride(-1) == 1
    assert pages.shape[1] % multiple == 0, f"pages of {pages.shape[1]} tokens"
    check_integers(table, (seqs, None))
    assert table.stride(-1) == 1
    assert int(table.min()) >= 0
    assert int(table.max()) < pages.shape[0]


def check_integers(tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    assert tensor.dtype == torch.int32, tensor.dtype
    assert tensor.dim() == len(shape)
    for size, wanted in zip(tensor.shape, shape, strict=True):
        assert wanted is None or size == wanted
    if tensor.dim() == 1:
        assert tensor.is_contiguous()


def check_offsets(offsets: torch.Tensor, lengths: torch.Tensor, longest: int) -> None:
    """Offsets begin at 0, never fall, and agree with the lengths; `longest` bounds them."""
    check_integers(offsets, (len(lengths) + 1,))
    assert int(offsets[0]) == 0
    assert torch.equal(offsets[1:] - offsets[:-1], lengths.to(torch.int32))
    assert isinstance(longest, int)
    assert int(lengths.max()) <= longest


def check_query(query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> None:
    keys, values = pages
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == keys.dtype == values.dtype
    assert keys.shape == values.shape
    assert query.stride(-1) == 1
    assert query.shape[-1] == keys.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    assert query.shape[-2] % keys.shape[2] == 0


def attend(query, pages, bounds, lengths, table, *, scale, left, softcap) -> torch.Tensor:
    """[T, heads, dim]; rows of nobody hold NaN. left: keys seen before the query's own, -1 all."""
    keys, values = pages
    out = torch.full_like(query, torch.nan)
    group = query.shape[1] // keys.shape[2]
    for seq in range(len(lengths)):
        begin, end, length = int(bounds[seq]), int(bounds[seq + 1]), int(lengths[seq])
        at = torch.arange(length)
        blocks = table[seq, at // keys.shape[1]].long()
        own = [p[blocks, at % keys.shape[1]].double() for p in (keys, values)]
        key, value = (p.repeat_interleave(group, 1) for p in own)
        position = torch.arange(length - (end - begin), length)[:, None]
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].double(), key) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        hidden = at > position
        if left >= 0:
            hidden |= at < position - left
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        value = value.masked_fill(hidden.all(0)[:, None, None], 0.0)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out


class Calls(list[str]):
    """The names of the functions called, in order."""


def _varlen(page_multiple: int, calls: Calls):
    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
            block_table):  # fmt: skip
        calls.append("varlen")
        assert max_seqlen_q > 1, "single tokens belong to flash_attn_with_kvcache"
        assert causal is True
        assert dropout_p == 0.0
        assert alibi_slopes is None
        assert return_attn_probs is False
        check_query(q, (k, v))
        seqs = len(cu_seqlens_q) - 1
        check_pages(k, block_table, page_multiple, seqs)
        check_offsets(cu_seqlens_q, cu_seqlens_q[1:] - cu_seqlens_q[:-1], max_seqlen_q)
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        check_offsets(cu_seqlens_k, lengths, max_seqlen_k)
        assert bool((lengths >= cu_seqlens_q[1:] - cu_seqlens_q[:-1]).all())
        left, right = window_size
        assert (left, right) == (-1, -1) or right == 0
        return attend(
            q, (k, v), cu_seqlens_q, lengths, block_table,
            scale=softmax_scale, left=left, softcap=softcap,
        )  # fmt: skip

    return run


def _kvcache(page_multiple: int, calls: Calls):
    def run(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size,
            softcap, num_splits):  # fmt: skip
        calls.append("kvcache")
        assert q.dim() == 4
        assert q.shape[1] == 1
        assert causal is True
        assert isinstance(num_splits, int)
        check_query(q, (k_cache, v_cache))
        check_pages(k_cache, block_table, page_multiple, len(q))
        check_integers(cache_seqlens, (len(q),))
        bounds = torch.arange(len(q) + 1)
        left, right = window_size
        assert (left, right) == (-1, -1) or right == 0
        return attend(
            q.squeeze(1), (k_cache, v_cache), bounds, cache_seqlens, block_table,
            scale=softmax_scale, left=left, softcap=softcap,
        ).unsqueeze(1)  # fmt: skip

    return run


# The real signatures, whose defaults and order are part of the contract.
# ruff: noqa: PLR0913


def vllm_flash_attn(calls: Calls) -> ModuleType:
    """vllm-flash-attn 2.6.2."""
    module = ModuleType("vllm_flash_attn")
    varlen, kvcache = _varlen(16, calls), _kvcache(16, calls)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        *,
        out=None,
    ):
        assert out is None
        return varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
            block_table,
        )  # fmt: skip

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
        *,
        out=None,
    ):
        assert {k, v, rotary_cos, rotary_sin, cache_batch_idx, alibi_slopes, out} == {None}
        assert return_softmax_lse is False
        return kvcache(
            q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size,
            softcap, num_splits,
        )  # fmt: skip

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash_attn(calls: Calls) -> ModuleType:
    """flash-attn 2.8.3."""
    module = ModuleType("flash_attn")
    varlen, kvcache = _varlen(256, calls), _kvcache(256, calls)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        return varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs,
            block_table,
        )  # fmt: skip

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        assert {k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad} == {None}
        assert alibi_slopes is None
        assert return_softmax_lse is False
        return kvcache(
            q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size,
            softcap, num_splits,
        )  # fmt: skip

    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def inside_vllm(calls: Calls) -> ModuleType:
    """vllm.vllm_flash_attn, FlashAttention 2."""
    module = ModuleType("vllm.vllm_flash_attn")

    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        fa_version=2,
        s_aux=None,
        cp_world_size=1,
        cp_rank=0,
        cp_tot_seqused_k=None,
    ):
        calls.append("varlen")
        assert causal is True
        assert cu_seqlens_k is None
        assert {q_v, alibi_slopes, out, scheduler_metadata, q_descale, s_aux} == {None}
        assert num_splits <= 1, "FlashAttention 2 splits no keys here"
        assert isinstance(window_size, list)
        check_query(q, (k, v))
        seqs = len(cu_seqlens_q) - 1
        check_pages(k, block_table, 16, seqs)
        check_offsets(cu_seqlens_q, cu_seqlens_q[1:] - cu_seqlens_q[:-1], max_seqlen_q)
        check_integers(seqused_k, (seqs,))
        assert int(seqused_k.max()) <= max_seqlen_k
        return attend(
            q, (k, v), cu_seqlens_q, seqused_k, block_table,
            scale=softmax_scale, left=window_size[0], softcap=softcap,
        )  # fmt: skip

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def torch_varlen(calls: Calls) -> ModuleType:
    """torch.nn.attention.varlen of torch 2.13."""
    module = ModuleType("torch.nn.attention.varlen")

    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
        seqused_k=None,
        block_table=None,
        num_splits=None,
    ):
        calls.append("varlen")
        assert cu_seq_k is None
        assert return_aux is None
        assert num_splits == 1
        # torch compares with this very tuple to know that attention is causal.
        assert isinstance(window_size, tuple)
        left, right = window_size
        assert right == 0
        assert enable_gqa or query.shape[1] == key.shape[2]
        check_query(query, (key, value))
        seqs = len(cu_seq_q) - 1
        check_pages(key, block_table, 256, seqs)
        check_offsets(cu_seq_q, cu_seq_q[1:] - cu_seq_q[:-1], max_q)
        check_integers(seqused_k, (seqs,))
        assert int(seqused_k.max()) <= max_k
        return attend(
            query, (key, value), cu_seq_q, seqused_k, block_table,
            scale=scale, left=left, softcap=0.0,
        )  # fmt: skip

    module.varlen_attn = varlen_attn
    return module
