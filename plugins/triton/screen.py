"""Decoding with the key screen: entmax's keys in 8 bits determine which keys are read in full.

`sharp.plugins.op.key_screen` has the definition and the proof. Two kernels replace `decode_observe`. `decode_screen`
reads the screen and stores the upper end of every logit's interval in scratch memory, in the place of the logit.
`decode_survivors` reads the keys whose upper end is above the row's limit, and replaces these upper ends by the logits.
The other upper ends stay. They are at most the limit, so `solve.py` and `decode_settled` give them the weight 0, like
the logits themselves. So the results are the same as if every key had been read, bit for bit.

Keys are read in strips of 16, which for 16-bit caches are one sector of memory per channel. If most keys are in doubt,
most are read; there is no other kernel for that case.

Between both kernels column 7 of `sums` holds each split's largest lower end, and column 6 its smallest upper end.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.decode import collects, store_sums
from sharp.plugins.triton.loads import blocks_of, cache_of, head_values, load_pages, load_query, row_numbers, sink_of
from sharp.plugins.triton.normalizers import added_up, empty_state, logit_factor
from sharp.plugins.triton.plan import item_of
from sharp.plugins.triton.rows import decode_rows, row_bounds, rows_left, scratch_row, split_bounds, split_row
from sharp.plugins.triton.screen_interval import (
    bounded_rows,
    interval,
    load_bounds,
    load_words,
    position_bias,
    screen_products,
)
from sharp.plugins.triton.walk import tile_logits

INTEGERS = (
    *("sequences", "q_heads", "kv_heads", "max_blocks", "slots", "most_tokens", "units", "window", "causal"),
    *("parameters", "shifted"),
)
STRIP = tl.constexpr(16)  # keys that are read together


@triton.jit
def in_blocks(keys, exists, cache, OPTIONS: tl.constexpr):
    """Return which places of the rows' scratch memory for logits exist for a tile's `keys` [keys], bool [rows, keys].

    A row has places for the keys that it may see, rounded up to whole blocks, so that reads may be vectors. Rows that
    do not `exist` have none.
    """
    return exists[:, None] & (keys // OPTIONS.block_size < blocks_of(cache[6], OPTIONS))[None, :]


@triton.jit
def screen_split(
    bounds,
    parts,
    factors,
    row,
    cache,
    key_screen,
    stored,
    place,
    scale,
    softcap,
    OPTIONS: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Store the upper ends of a split's logits, and the split's largest lower and smallest upper end.

    `bounds` is (low, high), `parts` and `factors` are the results of `bounded_rows`, `stored` is (pointers [rows] to
    the places of key 0, whether the rows exist). `place` [rows] points to the split's sums: column 7 gets the largest
    lower end, column 6 with STATISTICS the smallest upper end. A key that a row does not see gets -infinity.
    """
    low, high = bounds
    constant, of_distance, of_scale, always = factors
    pointers, exists = stored
    _, begins, ends, _, _, _ = row
    kv_head, kv_heads = cache[7], cache[8]
    highest_lower = tl.full([OPTIONS.rows, OPTIONS.keys], -float("inf"), tl.float32)
    lowest_upper = -highest_lower
    # Triton prefetches only operands of matrix products, so the loop loads scales and distances one tile ahead.
    first = low // OPTIONS.keys * OPTIONS.keys
    page_behind = load_pages(first, cache, OPTIONS, False)
    scales_behind, distances_behind = load_bounds(first, page_behind, key_screen, kv_head, kv_heads, OPTIONS)
    page_behind = load_pages(first + OPTIONS.keys, cache, OPTIONS, False)
    for tile in tl.range(low // OPTIONS.keys, (high + OPTIONS.keys - 1) // OPTIONS.keys):
        start = tile * OPTIONS.keys
        keys = start + tl.arange(0, OPTIONS.keys)
        scales, distances = scales_behind, distances_behind
        scales_behind, distances_behind = load_bounds(
            start + OPTIONS.keys, page_behind, key_screen, kv_head, kv_heads, OPTIONS
        )
        page_behind = load_pages(start + 2 * OPTIONS.keys, cache, OPTIONS, False)
        page = load_pages(start, cache, OPTIONS, False)
        words = load_words(start, page, key_screen, kv_head, kv_heads, OPTIONS)
        found = screen_products(parts, words, OPTIONS)
        z = found * (scales * scale)[None, :] + constant[:, None]
        width = distances[None, :] * of_distance[:, None] + (scales[None, :] * of_scale[:, None] + always[:, None])
        lower, upper = interval(start, z - width, z + width, row, softcap, OPTIONS)
        key = tl.where(page >= 0, keys, -1)[None, :]
        sees = (key >= begins[:, None]) & (key < ends[:, None])
        highest_lower = tl.maximum(highest_lower, tl.where(sees, lower, -float("inf")))
        if STATISTICS:
            lowest_upper = tl.minimum(lowest_upper, tl.where(sees, upper, float("inf")))
        upper = tl.where(sees, upper, -float("inf"))
        tl.store(pointers[:, None] + keys[None, :], upper, mask=in_blocks(keys, exists, cache, OPTIONS))
    tl.store(place + 7, tl.max(highest_lower, 1), mask=exists)
    if STATISTICS:
        tl.store(place + 6, tl.min(lowest_upper, 1), mask=exists)


@triton.jit(do_not_specialize=INTEGERS)
def decode_screen(
    query,
    key_screen,
    key_shift,
    block_table,
    query_start,
    context_lens,
    alibi_slopes,
    collect_stats,
    plan,
    sums,
    logits,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    units,
    shifted,
    window,
    causal,
    scale,
    softcap,
    OPTIONS: tl.constexpr,
):
    """Store the upper ends of a split's logits, from the screen alone. Grid: work items, KV heads * row blocks.

    `key_screen` points to int32 words [blocks, kv_heads, screen_bytes / 4]. `key_shift` [kv_heads, head_dim] is read if
    `shifted` is not 0. `logits` gets the upper ends, column 7 of `sums` each split's largest lower end, and column 6
    its smallest upper end if statistics are requested.
    """
    item = tl.program_id(0)
    unit, split, most = item_of(plan, units, query_start, sequences, most_tokens, item)
    sequence, first, count, _, _ = unit
    if rows_left(count, q_heads, kv_heads, most_tokens, OPTIONS) < 1:
        return
    position, begin, end, low, high, _ = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, split, most, OPTIONS
    )
    if low >= high:
        return
    kv_head, heads, tokens, exists = decode_rows(count, q_heads, kv_heads, most_tokens, OPTIONS)
    slope, b, n = head_values(alibi_slopes, alibi_slopes, heads, exists, 0, OPTIONS)
    begins, ends = row_bounds(position + tokens, end, window, causal)
    numbers = row_numbers(first, count, tokens, heads, q_heads, OPTIONS)
    parts, constant, of_distance, of_scale, always = bounded_rows(
        query, key_shift, numbers, exists, slope, kv_head, shifted, scale, OPTIONS
    )
    row = (position + tokens, begins, ends, tl.where(tl.abs(slope) < 2.0**60, slope, 0.0), b, n)
    tensors = (key_screen, key_screen, key_screen, key_screen)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    own = scratch_row(unit, tokens, most_tokens, q_heads, heads)
    stored = (logits + own * max_blocks * OPTIONS.block_size, exists)
    place = sums + split_row(item, tokens, most_tokens, q_heads, heads) * 8
    bounds, factors = (low, high), (constant, of_distance, of_scale, always)
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            screen_split(bounds, parts, factors, row, cache, key_screen, stored, place, scale, softcap, OPTIONS, True)
    else:
        screen_split(bounds, parts, factors, row, cache, key_screen, stored, place, scale, softcap, OPTIONS, False)


@triton.jit
def limits(place, stride, splits, exists, sink, alpha, MOST_SPLITS: tl.constexpr, STATISTICS: tl.constexpr):
    """Return two limits per row: logits up to the first have no weight; the smallest logit is at most the second.

    `place` [rows] points to each row's sums of its first split; other splits follow at `stride`. The largest logit is
    never below the first limit, whatever the sink is, because thresholds are relative to it. The second limit is the
    smallest upper end, and -infinity without STATISTICS.
    """
    split = tl.arange(0, MOST_SPLITS)
    inside = (split < splits)[:, None] & exists[None, :]
    at = place[None, :] + split[:, None] * stride
    lower = tl.max(tl.load(at + 7, mask=inside, other=-float("inf")), 0)
    width = 1.0 / (alpha - 1.0)
    highest = tl.maximum(lower, tl.minimum(sink, lower + width))
    # A threshold may lie 1e-5 below its exact bound (`entmax_bracket`).
    limit = highest - width * (1.0 + 2.0**-15) - tl.abs(highest) * 2.0**-20
    smallest = lower - float("inf")
    if STATISTICS:
        smallest = tl.min(tl.load(at + 6, mask=inside, other=float("inf")), 0)
    return limit, smallest


@triton.jit
def may_be_smallest(start, upper, page, row, smallest, key_screen, cache, factors, softcap, OPTIONS: tl.constexpr):
    """Return whether a logit may be its row's smallest, bool [rows, keys]: its lower end is at most `smallest` [rows].

    `upper` are the upper ends of the tile at `start`; `factors` is w's factors of d, s and 1 (`bounded_rows`).
    """
    of_distance, of_scale, always = factors
    scales, distances = load_bounds(start, page, key_screen, cache[7], cache[8], OPTIONS)
    width = distances[None, :] * of_distance[:, None] + (scales[None, :] * of_scale[:, None] + always[:, None])
    # The interval is at most twice the width long, plus the margins of `interval` and the rounding errors here.
    width = width * (2.0 + 2.0**-10) + tl.abs(upper) * 2.0**-20
    if OPTIONS.softcap:
        width += softcap * 2.0**-16
    if OPTIONS.alibi:
        width += tl.abs(position_bias(start, row, OPTIONS)) * 2.0**-18
    return ~(upper - width > smallest[:, None])


@triton.jit
def load_upper(start, stored, cache, OPTIONS: tl.constexpr):
    """Return the stored upper ends of the logits [rows, keys] of the tile at `start`; -infinity for keys not seen.

    `stored` is (pointers [rows] to the places of key 0, whether the rows exist).
    """
    pointers, exists = stored
    keys = start + tl.arange(0, OPTIONS.keys)
    inside = in_blocks(keys, exists, cache, OPTIONS)
    return tl.load(pointers[:, None] + keys[None, :], mask=inside, other=-float("inf"))


@triton.jit
def read_split(
    bounds,
    source,
    stored,
    limits_of_rows,
    key_screen,
    factors,
    sums,
    index,
    OPTIONS: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Replace the upper ends of a split's keys that may have a weight by their logits, and store the rows' sums.

    `limits_of_rows` is the result of `limits`. With STATISTICS the keys that may have the smallest logit are read, too.
    `bounds` is (low, high), `source` that of a walk, `stored` (pointers [rows] to the places of key 0, whether the rows
    exist), `index` the rows of `sums`.
    """
    limit, smallest = limits_of_rows
    peak, total, weighted_log, highest, lowest, visible, support, output, opposed = empty_state(OPTIONS, True)
    low, high = bounds
    query, row, cache, attributes = source
    _, begins, ends, _, _, _ = row
    scale, softcap, _ = attributes
    factor = logit_factor(scale, OPTIONS)
    pointers, exists = stored
    upper_behind = load_upper(low // OPTIONS.keys * OPTIONS.keys, stored, cache, OPTIONS)
    for tile in tl.range(low // OPTIONS.keys, (high + OPTIONS.keys - 1) // OPTIONS.keys):
        start = tile * OPTIONS.keys
        keys = start + tl.arange(0, OPTIONS.keys)
        upper = upper_behind
        upper_behind = load_upper(start + OPTIONS.keys, stored, cache, OPTIONS)  # arrives while this tile is computed
        seen = upper != -float("inf")
        visible += seen.to(tl.float32)
        doubtful = seen & ~(upper <= limit[:, None])
        if STATISTICS:
            page = load_pages(start, cache, OPTIONS, False)
            doubtful |= seen & may_be_smallest(
                start, upper, page, row, smallest, key_screen, cache, factors, softcap, OPTIONS
            )
        if tl.max(doubtful.to(tl.int32)) > 0:
            by_key = tl.max(doubtful.to(tl.int32), 0)
            STRIPS: tl.constexpr = OPTIONS.keys // STRIP
            by_strip = tl.max(tl.reshape(by_key, [STRIPS, STRIP]), 1)
            read = tl.reshape(tl.broadcast_to(by_strip[:, None], [STRIPS, STRIP]), [OPTIONS.keys])
            page = load_pages(start, cache, OPTIONS, False)
            page = tl.max_constancy(tl.where(read > 0, page, -1), STRIP)
            found = tile_logits(query, start, page, row, cache, attributes, OPTIONS, False)
            key = tl.where(page >= 0, keys, -1)[None, :]
            sees = (key >= begins[:, None]) & (key < ends[:, None])
            found = tl.where(sees, found, -float("inf"))
            tl.debug_barrier()  # other threads must have read the upper ends
            tl.store(
                pointers[:, None] + keys[None, :],
                found * factor,
                mask=in_blocks(keys, exists, cache, OPTIONS) & (read > 0)[None, :],
            )
            peak = tl.maximum(peak, found)
            if STATISTICS:
                lowest = tl.minimum(lowest, tl.where(sees, found, float("inf")))
    state = (peak, total, weighted_log, highest, lowest, visible, support, output, opposed)
    state = added_up(state, factor, OPTIONS, True)
    store_sums(sums, index, exists, state, scale, OPTIONS, True, False, STATISTICS)


@triton.jit(do_not_specialize=INTEGERS)
def decode_survivors(
    query,
    key_cache,
    key_screen,
    key_shift,
    block_table,
    query_start,
    context_lens,
    head_params,
    alibi_slopes,
    collect_stats,
    plan,
    sums,
    logits,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    units,
    parameters,
    shifted,
    window,
    causal,
    scale,
    softcap,
    alpha,
    MOST_SPLITS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Store the logits of keys that may have a weight, and the split's sums with the rows' largest logits.

    Grid: work items, KV heads * row blocks. `logits` and `sums` are what `decode_screen` stored for all splits.
    """
    item = tl.program_id(0)
    unit, split, most = item_of(plan, units, query_start, sequences, most_tokens, item)
    sequence, first, count, _, _ = unit
    if rows_left(count, q_heads, kv_heads, most_tokens, OPTIONS) < 1:
        return
    position, begin, end, low, high, splits = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, split, most, OPTIONS
    )
    if low >= high:
        return
    kv_head, heads, tokens, exists = decode_rows(count, q_heads, kv_heads, most_tokens, OPTIONS)
    slope, b, n = head_values(head_params, alibi_slopes, heads, exists, parameters, OPTIONS)
    begins, ends = row_bounds(position + tokens, end, window, causal)
    row = (position + tokens, begins, ends, slope, b, n)
    tensors = (key_cache, key_cache, key_screen, key_screen)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    numbers = row_numbers(first, count, tokens, heads, q_heads, OPTIONS)
    source = (load_query(query, numbers, exists, OPTIONS), row, cache, (scale, softcap, 0.0))
    own = scratch_row(unit, tokens, most_tokens, q_heads, heads)
    stored = (logits + own * max_blocks * OPTIONS.block_size, exists)
    index = split_row(item, tokens, most_tokens, q_heads, heads)
    leading = sums + split_row(item - split, tokens, most_tokens, q_heads, heads) * 8
    stride = split_row(1, 0, most_tokens, q_heads, 0) * 8
    sink = sink_of(head_params, heads, exists, parameters, OPTIONS)
    bounds = (low, high)
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            limit, smallest = limits(leading, stride, splits, exists, sink, alpha, MOST_SPLITS, True)
            bounded = bounded_rows(query, key_shift, numbers, exists, slope, kv_head, shifted, scale, OPTIONS)
            factors = (bounded[2], bounded[3], bounded[4])
            read_split(bounds, source, stored, (limit, smallest), key_screen, factors, sums, index, OPTIONS, True)
    else:
        limit, smallest = limits(leading, stride, splits, exists, sink, alpha, MOST_SPLITS, False)
        read_split(bounds, source, stored, (limit, smallest), key_screen, 0.0, sums, index, OPTIONS, False)
