"""The loop over keys that all attention kernels share: online softmax (Milakov and Gimelshein,
2018) in tiles (Dao et al., 2022), every key's page looked up in the block table."""

# A kernel is handed pointers, strides and sizes one by one.
# ruff: noqa: PLR0913
import triton
import triton.language as tl


@triton.jit
def attend_tiles(
    query,
    position,
    keys,
    values,
    table,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    begin,
    end,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Rows against keys [begin, end) of one sequence and one KV head.

    query: [ROWS, PADDED_DIM], zeros beyond HEAD_DIM. position: [ROWS], of the row's token in its
    sequence; -1 sees nothing. keys, values: at the KV head in block 0. table: the sequence's row.
    Returns the maximum [ROWS] of the scores in units of log 2, the sum [ROWS] and the output
    [ROWS, PADDED_DIM] that belong to it, not normalised; -inf, 0 and 0 where nothing was seen.

    A slot outside [begin, end) is never loaded: whatever it holds, NaN included, reaches nothing.
    """
    ROWS: tl.constexpr = query.shape[0]
    LOG2E: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, PADDED_DIM)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in range(begin, end, TILE):
        key_position = start + tl.arange(0, TILE)
        inside = key_position < end
        block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = key_position % BLOCK_SIZE
        live = inside[:, None] & (dims < HEAD_DIM)[None, :]
        key_at = block * key_block_stride + slot * key_slot_stride
        key = tl.load(keys + key_at[:, None] + dims[None, :], mask=live, other=0.0)
        # ieee: TF32 would lose half of the digits of fp32.
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            # softcap * tanh(x); this form of tanh saturates instead of overflowing.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        seen = inside[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet would compute -inf - -inf.
        finite = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, 1)
        value_at = block * value_block_stride + slot * value_slot_stride
        value = tl.load(values + value_at[:, None] + dims[None, :], mask=live, other=0.0)
        product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        output = output * shrink[:, None] + product
        highest = raised
    return highest, total, output
