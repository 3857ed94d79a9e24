"""Storing a step's keys and values in their pages, with or without rotating them on the way."""

# A kernel is handed pointers, strides and sizes one by one.
# ruff: noqa: PLR0913
import triton
import triton.language as tl


@triton.jit
def write_kernel(
    key,
    value,
    keys,
    values,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    keys_block_stride,
    keys_slot_stride,
    keys_head_stride,
    values_block_stride,
    values_slot_stride,
    values_head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Grid: (tokens, KV heads). A slot of -1 is padding: nothing is written."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        within = slot % BLOCK_SIZE
        dims = tl.arange(0, PADDED_DIM)
        live = dims < HEAD_DIM
        key_at = token * key_token_stride + head * key_head_stride
        value_at = token * value_token_stride + head * value_head_stride
        keys_at = block * keys_block_stride + within * keys_slot_stride + head * keys_head_stride
        values_at = block * values_block_stride + within * values_slot_stride
        values_at += head * values_head_stride
        tl.store(keys + keys_at + dims, tl.load(key + key_at + dims, mask=live), mask=live)
        tl.store(values + values_at + dims, tl.load(value + value_at + dims, mask=live), mask=live)


@triton.jit
def rotate_kernel(
    heads,
    cos,
    sin,
    query,
    keys,
    values,
    slots,
    keys_block_stride,
    keys_slot_stride,
    keys_head_stride,
    values_block_stride,
    values_slot_stride,
    values_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """One head of one token: rotated unless it is a value, then stored where it belongs.

    Grid: (tokens, NUM_HEADS + 2 * NUM_KV_HEADS). heads: [tokens, query | key | value heads,
    2 * HALF_DIM], contiguous. cos, sin: [tokens, HALF_DIM], contiguous. query: [tokens,
    NUM_HEADS, 2 * HALF_DIM], contiguous. A slot of -1 is padding: no key or value is written.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, PADDED_HALF)
    live = pair < HALF_DIM
    source = heads + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF_DIM)
    first = tl.load(source + pair, mask=live).to(tl.float32)
    second = tl.load(source + HALF_DIM + pair, mask=live).to(tl.float32)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    cosine = tl.load(cos + token * HALF_DIM + pair, mask=live).to(tl.float32)
    sine = tl.load(sin + token * HALF_DIM + pair, mask=live).to(tl.float32)
    low = tl.where(is_value, first, first * cosine - second * sine)
    high = tl.where(is_value, second, second * cosine + first * sine)
    if head < NUM_HEADS:
        target = query + (token * NUM_HEADS + head) * (2 * HALF_DIM)
        tl.store(target + pair, low.to(query.dtype.element_ty), mask=live)
        tl.store(target + HALF_DIM + pair, high.to(query.dtype.element_ty), mask=live)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            within = slot % BLOCK_SIZE
            if is_value:
                kv_head = head - NUM_HEADS - NUM_KV_HEADS
                target = values + block * values_block_stride + within * values_slot_stride
                target += kv_head * values_head_stride
                tl.store(target + pair, low.to(values.dtype.element_ty), mask=live)
                tl.store(target + HALF_DIM + pair, high.to(values.dtype.element_ty), mask=live)
            else:
                kv_head = head - NUM_HEADS
                target = keys + block * keys_block_stride + within * keys_slot_stride
                target += kv_head * keys_head_stride
                tl.store(target + pair, low.to(keys.dtype.element_ty), mask=live)
                tl.store(target + HALF_DIM + pair, high.to(keys.dtype.element_ty), mask=live)
