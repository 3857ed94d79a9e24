"""Decodes in parts (Flash-Decoding, Dao et al., 2023): one query alone cannot fill a GPU, so the
keys of a sequence are shared out over several programs and their results put together."""

# A kernel is handed pointers, strides and sizes one by one.
# ruff: noqa: PLR0913
import triton
import triton.language as tl

from workers.attention.triton_kernels.tiles import attend_tiles


@triton.jit
def split_kernel(
    partial,
    statistics,
    query,
    keys,
    values,
    tables,
    cu_seqlens_q,
    seqused_k,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Attend one token's GROUP heads to one part of its keys.

    Grid: (sequences, KV heads, SPLITS). partial: [sequences, heads, SPLITS, HEAD_DIM], outputs
    that are not normalised; statistics: [sequences, heads, SPLITS, 2], maximum and sum. fp32,
    contiguous.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    token = tl.load(cu_seqlens_q + seq).to(tl.int64)
    length = tl.load(seqused_k + seq)
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    owned = row < GROUP
    head = kv_head * GROUP + row
    live = owned[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = token * query_token_stride + head * query_head_stride
    rows = tl.load(query + query_at[:, None] + dims[None, :], mask=live, other=0.0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    # Whole tiles, so that only the last part has a ragged one.
    size = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    begin = first + split * size
    highest, total, output = attend_tiles(
        rows,
        tl.where(owned, length - 1, -1),
        keys + kv_head * key_head_stride,
        values + kv_head * value_head_stride,
        tables + seq * table_stride,
        key_block_stride,
        key_slot_stride,
        value_block_stride,
        value_slot_stride,
        begin,
        tl.minimum(begin + size, length),
        scale,
        softcap,
        WINDOW,
        CAPPED,
        BLOCK_SIZE,
        TILE,
        HEAD_DIM,
        PADDED_DIM,
    )
    heads = tl.num_programs(1) * GROUP
    part = (seq * heads + head) * SPLITS + split
    tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], output, mask=live)
    tl.store(statistics + part * 2, highest, mask=owned)
    tl.store(statistics + part * 2 + 1, total, mask=owned)


@triton.jit
def reduce_kernel(
    out,
    partial,
    statistics,
    cu_seqlens_q,
    out_token_stride,
    out_head_stride,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Put the parts of one head of one token together. Grid: (sequences, heads)."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    begin = tl.load(cu_seqlens_q + seq).to(tl.int64)
    # A sequence without a token pads a captured launch; there is no row of `out` for it.
    if tl.load(cu_seqlens_q + seq + 1) > begin:
        split = tl.arange(0, SPLITS)
        dims = tl.arange(0, PADDED_DIM)
        part = (seq * tl.num_programs(1) + head) * SPLITS + split
        highest = tl.load(statistics + part * 2)
        total = tl.load(statistics + part * 2 + 1)
        top = tl.max(highest, 0)
        weight = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))
        live = (dims < HEAD_DIM)[None, :]
        at = part[:, None] * HEAD_DIM + dims[None, :]
        outputs = tl.load(partial + at, mask=live, other=0.0)
        denominator = tl.sum(total * weight, 0)
        output = tl.sum(outputs * weight[:, None], 0)
        output = output / tl.where(denominator == 0.0, 1.0, denominator)
        out_at = begin * out_token_stride + head * out_head_stride
        tl.store(out + out_at + dims, output.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
