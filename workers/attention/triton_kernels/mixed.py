"""One launch for a mixed batch: a program per (block of queries, KV head)."""

# A kernel is handed pointers, strides and sizes one by one.
# ruff: noqa: PLR0913
import triton
import triton.language as tl

from workers.attention.triton_kernels.tiles import attend_tiles


@triton.jit
def find_sequence(cu_seqlens_q, num_seqs, unit, QUERIES: tl.constexpr):
    """The sequence that block `unit` belongs to.

    Sequence s starts at block cu_seqlens_q[s] // QUERIES + s. That leaves it at least
    ceil(length / QUERIES) blocks, so the number of blocks follows from the number of tokens and
    of sequences alone: the host needs no lengths, and a captured launch fits every step.
    """
    low = tl.full([], 0, tl.int32)
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens_q + middle) // QUERIES + middle
        low = tl.where(first <= unit, middle, low)
        high = tl.where(first <= unit, high, middle)
    return low


@triton.jit(do_not_specialize=["num_seqs"])
def mixed_kernel(
    out,
    query,
    keys,
    values,
    tables,
    cu_seqlens_q,
    seqused_k,
    num_seqs,
    out_token_stride,
    out_head_stride,
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
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Attend ROWS // GROUP queries of one sequence, each with the GROUP heads of a KV head.

    Grid: (tokens // (ROWS // GROUP) + num_seqs, KV heads).
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    unit = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = find_sequence(cu_seqlens_q, num_seqs, unit, QUERIES)
    first_token = tl.load(cu_seqlens_q + seq)
    count = tl.load(cu_seqlens_q + seq + 1) - first_token
    begin_query = (unit - (first_token // QUERIES + seq)) * QUERIES
    if begin_query < count:
        length = tl.load(seqused_k + seq)
        context = length - count
        row = tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED_DIM)
        number = begin_query + row // GROUP
        owned = (row < QUERIES * GROUP) & (number < count)
        token = (first_token + number).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        live = owned[:, None] & (dims < HEAD_DIM)[None, :]
        query_at = token * query_token_stride + head * query_head_stride
        rows = tl.load(query + query_at[:, None] + dims[None, :], mask=live, other=0.0)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(context + begin_query - WINDOW + 1, 0)
        end = context + tl.minimum(begin_query + QUERIES, count)
        _, total, output = attend_tiles(
            rows,
            tl.where(owned, context + number, -1),
            keys + kv_head * key_head_stride,
            values + kv_head * value_head_stride,
            tables + seq.to(tl.int64) * table_stride,
            key_block_stride,
            key_slot_stride,
            value_block_stride,
            value_slot_stride,
            begin,
            end,
            scale,
            softcap,
            WINDOW,
            CAPPED,
            BLOCK_SIZE,
            TILE,
            HEAD_DIM,
            PADDED_DIM,
        )
        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = token * out_token_stride + head * out_head_stride
        tl.store(out + out_at[:, None] + dims[None, :], output.to(out.dtype.element_ty), mask=live)
