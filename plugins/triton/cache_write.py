"""The first kernel of a step: it stores new keys and values, clears what no other kernel writes, and makes the plan."""

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
    """Store the keys and values of `OPTIONS.rows` tokens and one KV head; the last program in axis 0 makes the plan.

    Grid: token tiles and one program for the plan, KV heads.

    `key` and `value` point to [tokens, kv_heads, dim], the caches to the op's caches, which are changed, `slot_mapping`
    to int32 [tokens]. `output` is [tokens, q_heads, value_dim], `stats` [tokens, q_heads, `columns`]; `plan` is scratch
    memory as `make_plan` writes it. `units`, `workers`, `items` and `most_tokens` are those of `LaunchPlan`.

    Tokens whose slot is -1 or beyond the `slots` of the cache are not stored, because the host cannot check slots. The
    output of tokens behind the last sequence becomes 0, and so do all statistics.
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
    """Store this program's tile of tokens for one KV head, and clear their statistics and unused output.

    `new` is (key, value, key_cache, value_cache, slot_mapping), pointers as in `write_cache`. Return the keys as the
    cache holds them [rows, head_width], their slots [rows], and whether they were stored [rows].
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
    # The keys are transposed, so that neighbouring threads write neighbouring slots.
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
    """Write zeros into the tokens' statistics, and into the output of tokens behind the last sequence.

    `token` [rows] are numbers of tokens, of which those that `exists` are cleared, for the query heads of `kv_head`.
    """
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
    """Return numbers * inverse as float32, rounded to integers (ties to even) and limited to +-127; 0 for NaN."""
    scaled = numbers * inverse
    bounded = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
    ROUNDER: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer
    return tl.where(scaled == scaled, (bounded + ROUNDER) - ROUNDER, 0.0)


@triton.jit
def rounded(numbers, inverse, OPTIONS: tl.constexpr):
    """Return numbers * inverse as the cache stores them: integers as float32, or for fp8 the bytes of e4m3 as int32."""
    return encoded(numbers * inverse) if OPTIONS.cache_dtype == "fp8" else quantized(numbers, inverse)


@triton.jit
def store_token(held, scale, numbers, offset, column, OPTIONS: tl.constexpr):
    """Return a block [channels, block_size], as `rounded` gives it, and its scale after storing a token at `offset`.

    The result is that of `store_int8` and `store_fp8` in `sharp.plugins.op.reference`, bit for bit: a token at offset 0
    starts the block anew, and a later token with larger numbers raises the scale. `numbers` is the token's float32
    [channels]; `column` [block_size] numbers the block's slots.
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
def store_scaled(numbers, cache, scales, tokens_of_block, layout, channels, dim: tl.constexpr, OPTIONS: tl.constexpr):
    """Store all tokens of a block, in order, into a key or value cache with scales.

    `numbers` points to the new keys or values [tokens, kv_heads, `dim`], `cache` to the cache, `scales` to float32
    [blocks, kv_heads]. `tokens_of_block` is (token, tokens, slot_mapping, block, kv_head, kv_heads): of the next
    block_size tokens from `token` on, those of `block` are stored. `channels` counts from 0 to `dim` rounded up.
    `layout` [channels, block_size] gives the offsets of a block's numbers within the block.
    """
    token, tokens, slot_mapping, block, kv_head, kv_heads = tokens_of_block
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
    tl.debug_barrier()  # several threads read the scale and the numbers, so all must read before one writes
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
    """Store new keys and values into caches with scales; otherwise like `write_cache`.

    Grid: tokens and one program for the plan, KV heads. The program of a block's first token stores all tokens of the
    block. `key_scale` and `value_scale` point to float32 [blocks, kv_heads], which are changed.

    Tokens of one block must be less than a block apart, which holds when slots follow positions.
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
    tokens_of_block = (token, tokens, slot_mapping, block, kv_head, kv_heads)
    column = tl.arange(0, OPTIONS.block_size)
    channels = tl.arange(0, OPTIONS.head_width)
    layout = channels[:, None] * OPTIONS.block_size + column[None, :]
    store_scaled(key, key_cache, key_scale, tokens_of_block, layout, channels, OPTIONS.head_dim, OPTIONS)
    channels = tl.arange(0, OPTIONS.value_width)
    layout = column[None, :] * OPTIONS.value_dim + channels[:, None]
    store_scaled(value, value_cache, value_scale, tokens_of_block, layout, channels, OPTIONS.value_dim, OPTIONS)
