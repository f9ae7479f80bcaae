"""The first kernel of a step over a cache with a key screen: `write_cache`, which also writes the new keys' screen."""

import triton
import triton.language as tl

from sharp.plugins.triton.cache_write import quantized, store_tokens
from sharp.plugins.triton.plan import make_plan

INTEGERS = (
    *("tokens", "sequences", "q_heads", "kv_heads", "slots", "max_blocks", "most_tokens", "units", "workers", "items"),
    *("columns", "window", "causal", "shifted"),
)


@triton.jit
def store_screen(keys, slot, stored, key_screen, key_shift, kv_head, kv_heads, shifted, OPTIONS: tl.constexpr):
    """Store the screen of keys [rows, head_width] that a cache holds in these slots, for keys that were `stored`.

    `key_screen` points to int32 words [blocks, kv_heads, screen_bytes / 4], packed as by `key_screen.pack`.
    `key_shift` [kv_heads, head_dim] is read if `shifted` is not 0.

    The screen is that of `sharp.plugins.op.key_screen.screen_of`: integers and scale bit for bit, distances up to the
    order of a sum in float64.
    """
    channels = tl.arange(0, OPTIONS.head_width)
    within = (channels < OPTIONS.head_dim) & (channels * 0 + shifted != 0)
    shift = tl.load(key_shift + kv_head * OPTIONS.head_dim + channels, mask=within, other=0.0)[None, :]
    keys = keys.to(tl.float32)
    wide = keys.to(tl.float64)
    known = tl.sum(wide * wide, 1) < 2.0**120  # false for NaN
    moved = tl.where(known[:, None], keys - shift, 0.0)
    largest = tl.max(tl.abs(moved), 1)
    scale = tl.where(largest >= 2.0**-100, tl.div_rn(largest, 127.0), 0.0)
    positive = scale > 0
    inverse = tl.where(positive, tl.div_rn(1.0, tl.where(positive, scale, 1.0)), 0.0)
    integers = quantized(moved, inverse[:, None])
    exact = tl.where(known[:, None], wide, 0.0) - shift.to(tl.float64)
    rest = exact - scale.to(tl.float64)[:, None] * integers.to(tl.float64)
    distance = (tl.sqrt(tl.sum(rest * rest, 1)) * (1.0 + 2.0**-20)).to(tl.float32) + 2.0**-126
    distance = tl.where(known, distance, float("inf"))

    WORDS: tl.constexpr = (OPTIONS.quads + 2) * OPTIONS.block_size
    QUADS: tl.constexpr = OPTIONS.head_width // 4
    block = (slot // OPTIONS.block_size).to(tl.int64) * kv_heads + kv_head
    at = key_screen + block * WORDS + slot % OPTIONS.block_size
    bytes_ = tl.reshape(integers.to(tl.int32) & 255, [OPTIONS.rows, QUADS, 4])
    words = tl.sum(bytes_ << (8 * tl.arange(0, 4))[None, None, :], 2)
    quads = tl.arange(0, QUADS)
    inside = stored[:, None] & (quads < OPTIONS.quads)[None, :]
    tl.store(at[:, None] + quads[None, :] * OPTIONS.block_size, words, mask=inside)
    behind = at + OPTIONS.quads * OPTIONS.block_size
    tl.store(behind, scale.to(tl.int32, bitcast=True), mask=stored)
    tl.store(behind + OPTIONS.block_size, distance.to(tl.int32, bitcast=True), mask=stored)


@triton.jit(do_not_specialize=INTEGERS)
def write_screened_cache(
    key,
    value,
    key_cache,
    value_cache,
    key_screen,
    key_shift,
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
    shifted,
    columns,
    window,
    causal,
    OPTIONS: tl.constexpr,
):
    """Store tokens like `write_cache`, on the same grid, and the screen of the keys, packed as by `key_screen.pack`."""
    kv_head = tl.program_id(1)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if kv_head == 0:
            lengths = (query_start, context_lens)
            make_plan(plan, units, workers, items, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS)
        return
    new = (key, value, key_cache, value_cache, slot_mapping)
    keys, slot, stored = store_tokens(
        new, query_start, output, stats, tokens, sequences, q_heads, kv_heads, slots, columns, OPTIONS
    )
    store_screen(keys, slot, stored, key_screen, key_shift, kv_head, kv_heads, shifted, OPTIONS)
