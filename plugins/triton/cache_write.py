"""The first kernel of a step: new keys and values into slots, zeros where no other kernel writes, and the plan."""

import triton
import triton.language as tl

from sharp.plugins.triton.e4m3 import decoded, encoded, scale_of
from sharp.plugins.triton.plan import make_plan

INTEGERS = (
    *("tokens", "sequences", "q_heads", "kv_heads", "slots", "max_blocks", "most_tokens", "units", "workers", "items"),
    *("columns", "window", "causal"),
)


@triton.jit(do_not_specialize=INTEGERS)
def write_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    query_start,
    context_lens,
    output,
    stats,
    plan,
    tokens,
    sequences,
    q_heads,
    kv_heads,
    slots,
    max_blocks,
    most_tokens,
    units,
    workers,
    items,
    columns,
    window,
    causal,
    OPTIONS: tl.constexpr,
):
    """Tiles of `OPTIONS.rows` tokens and one KV head. Grid: token tiles and one program for the plan, KV heads.

    A slot of -1 is not stored, nor is one behind the `slots` of the cache: the host cannot see them. The output of
    tokens behind the last sequence's becomes 0, and so do all statistics.
    """
    kv_head = tl.program_id(1)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if kv_head == 0:
            lengths = (query_start, context_lens)
            make_plan(plan, units, workers, items, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS)
        return
    new = (key, value, key_cache, value_cache, slot_mapping)
    store_tokens(new, query_start, output, stats, tokens, sequences, q_heads, kv_heads, slots, columns, OPTIONS)


@triton.jit
def store_tokens(
    new, query_start, output, stats, tokens, sequences, q_heads, kv_heads, slots, columns, OPTIONS: tl.constexpr
):
    """What a program of `write_cache` stores; `new` are its first five arguments.

    Returns the keys as the cache holds them [rows, head_width], their slots, and whether they were stored.
    """
    key, value, key_cache, value_cache, slot_mapping = new
    kv_head = tl.program_id(1)
    token = tl.program_id(0) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    exists = token < tokens
    slot = tl.load(slot_mapping + token, mask=exists, other=-1)
    stored = (slot >= 0) & (slot < slots)
    row = token.to(tl.int64) * kv_heads + kv_head
    panel = (slot // OPTIONS.block_size).to(tl.int64) * kv_heads + kv_head
    offset = slot % OPTIONS.block_size

    channels = tl.arange(0, OPTIONS.head_width)
    within = channels < OPTIONS.head_dim
    inside = stored[:, None] & within[None, :]
    keys = tl.load(key + row[:, None] * OPTIONS.head_dim + channels[None, :], mask=inside, other=0.0)
    keys = keys.to(key_cache.dtype.element_ty)
    place = panel * (OPTIONS.head_dim * OPTIONS.block_size) + offset
    # Transposed, so that neighbouring threads write neighbouring slots.
    at = key_cache + place[None, :] + channels[:, None] * OPTIONS.block_size
    tl.store(at, tl.trans(keys), mask=within[:, None] & stored[None, :])

    channels = tl.arange(0, OPTIONS.value_width)
    within = channels < OPTIONS.value_dim
    inside = stored[:, None] & within[None, :]
    values = tl.load(value + row[:, None] * OPTIONS.value_dim + channels[None, :], mask=inside, other=0.0)
    at = value_cache + (panel * OPTIONS.block_size + offset)[:, None] * OPTIONS.value_dim + channels[None, :]
    tl.store(at, values.to(value_cache.dtype.element_ty), mask=inside)

    clear(token, exists, query_start, output, stats, sequences, q_heads, kv_heads, kv_head, columns, OPTIONS)
    return keys, slot, stored


@triton.jit
def clear(
    token, exists, query_start, output, stats, sequences, q_heads, kv_heads, kv_head, columns, OPTIONS: tl.constexpr
):
    """Zeros into the tokens' statistics, and into the output of those behind the last sequence's."""
    group = q_heads // kv_heads
    channels = tl.arange(0, OPTIONS.value_width)
    within = channels < OPTIONS.value_dim
    unused = exists & (token >= tl.load(query_start + sequences))
    column = tl.arange(0, 8)
    cleared = exists[:, None] & (column < columns)[None, :]
    for member in tl.range(0, group):
        head = token.to(tl.int64) * q_heads + kv_head * group + member
        tl.store(stats + head[:, None] * columns + column[None, :], 0.0, mask=cleared)
        at = output + head[:, None] * OPTIONS.value_dim + channels[None, :]
        tl.store(at, 0.0, mask=unused[:, None] & within[None, :])


@triton.jit
def quantized(numbers, inverse):
    """Integers as float32, rounded to even; 0 for NaN, of which the scale tells."""
    scaled = numbers * inverse
    bounded = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
    ROUNDER: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer
    return tl.where(scaled == scaled, (bounded + ROUNDER) - ROUNDER, 0.0)


@triton.jit
def rounded(numbers, inverse, OPTIONS: tl.constexpr):
    """What the cache holds of numbers: integers as float32, or the bytes of e4m3 as int32."""
    return encoded(numbers * inverse) if OPTIONS.cache_dtype == "fp8" else quantized(numbers, inverse)


@triton.jit
def store_token(held, scale, numbers, offset, column, OPTIONS: tl.constexpr):
    """A block [channels, block_size] as `rounded` gives it, and its scale, after a token at `offset` went into it.

    As `store_int8` and `store_fp8` of `sharp.plugins.ops.reference` say, to the bit. `column` [block_size] numbers the
    block's slots.
    """
    sizes = tl.abs(numbers)
    FP8: tl.constexpr = OPTIONS.cache_dtype == "fp8"
    needed = scale_of(tl.max(sizes, 0)) if FP8 else tl.div_rn(tl.max(sizes, 0), 127.0)
    needed = tl.where(tl.sum((sizes != sizes).to(tl.int32), 0) > 0, float("nan"), needed)
    anew = offset == 0
    raised = (scale == scale) & ~(needed <= scale) & ~anew
    ratio = tl.div_rn(scale, tl.where(raised, needed, 1.0))
    held = tl.where(raised, rounded(decoded(held) if FP8 else held, ratio, OPTIONS), held)
    scale = tl.where(anew | raised, needed, scale)
    positive = scale > 0
    inverse = tl.where(positive, tl.div_rn(1.0, tl.where(positive, scale, 1.0)), 0.0)
    held = tl.where((column == offset)[None, :], rounded(numbers, inverse, OPTIONS)[:, None], held)
    return held, scale


@triton.jit
def store_scaled(
    numbers,
    cache,
    scales,
    token,
    tokens,
    slot_mapping,
    block,
    kv_head,
    kv_heads,
    layout,
    channels,
    dim: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """All tokens from `token` on that go to `block`, in order, into one of two caches.

    `layout` [channels, block_size] says where a block's numbers lie in it.
    """
    head = block.to(tl.int64) * kv_heads + kv_head
    within = channels < dim
    at = cache + head * (dim * OPTIONS.block_size) + layout
    held = tl.load(at, mask=within[:, None], other=0).to(tl.int32 if OPTIONS.cache_dtype == "fp8" else tl.float32)
    scale = tl.load(scales + head)
    column = tl.arange(0, OPTIONS.block_size)
    for distance in tl.range(0, OPTIONS.block_size):
        following = token + distance
        slot = tl.load(slot_mapping + following, mask=following < tokens, other=-1)
        if (slot >= 0) & (slot // OPTIONS.block_size == block):
            row = (following.to(tl.int64) * kv_heads + kv_head) * dim
            new = tl.load(numbers + row + channels, mask=within, other=0.0).to(tl.float32)
            held, scale = store_token(held, scale, new, slot % OPTIONS.block_size, column, OPTIONS)
    tl.debug_barrier()  # several threads read the scale, and may read the same numbers
    tl.store(at, held.to(cache.dtype.element_ty), mask=within[:, None])
    tl.store(scales + head, scale)


@triton.jit(do_not_specialize=INTEGERS)
def write_scaled_cache(
    key,
    value,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    slot_mapping,
    query_start,
    context_lens,
    output,
    stats,
    plan,
    tokens,
    sequences,
    q_heads,
    kv_heads,
    slots,
    max_blocks,
    most_tokens,
    units,
    workers,
    items,
    columns,
    window,
    causal,
    OPTIONS: tl.constexpr,
):
    """`write_cache` for caches with scales. Grid: tokens and one program for the plan, KV heads.

    The first token of a block stores all that go to it.

    Tokens of one block must be less than a block apart, as they are when slots follow positions.
    """
    token, kv_head = tl.program_id(0), tl.program_id(1)
    if token == tl.num_programs(0) - 1:
        if kv_head == 0:
            lengths = (query_start, context_lens)
            make_plan(plan, units, workers, items, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS)
        return
    own = token + tl.arange(0, 1)
    clear(own, own >= 0, query_start, output, stats, sequences, q_heads, kv_heads, kv_head, columns, OPTIONS)
    slot = tl.load(slot_mapping + token)
    if (slot < 0) | (slot >= slots):
        return
    block = slot // OPTIONS.block_size
    before = token - 1 - tl.arange(0, OPTIONS.block_size)
    earlier = tl.load(slot_mapping + before, mask=(before >= 0) & (before > token - OPTIONS.block_size), other=-1)
    if tl.sum(((earlier >= 0) & (earlier // OPTIONS.block_size == block)).to(tl.int32), 0) > 0:
        return
    column = tl.arange(0, OPTIONS.block_size)
    channels = tl.arange(0, OPTIONS.head_width)
    store_scaled(
        key,
        key_cache,
        key_scale,
        token,
        tokens,
        slot_mapping,
        block,
        kv_head,
        kv_heads,
        channels[:, None] * OPTIONS.block_size + column[None, :],
        channels,
        OPTIONS.head_dim,
        OPTIONS,
    )
    channels = tl.arange(0, OPTIONS.value_width)
    store_scaled(
        value,
        value_cache,
        value_scale,
        token,
        tokens,
        slot_mapping,
        block,
        kv_head,
        kv_heads,
        column[None, :] * OPTIONS.value_dim + channels[:, None],
        channels,
        OPTIONS.value_dim,
        OPTIONS,
    )
