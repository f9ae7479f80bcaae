"""Decoding: sequences of one or few tokens, with their keys split over programs; `merge.py` merges the splits.

A program computes one work item, a range of keys given by the plan that the first kernel makes (`plan.py`).

Query heads that share a KV head are the rows of one tile, and so are the tokens of a sequence, up to `most_tokens`.
Keys and values are then read once for all these rows. If a tile has too few rows (such as for 4 tokens and groups of 8
heads), other programs take the remaining rows at about the same time and find keys and values in the L2 cache.
Sequences with more tokens are computed by `prefill.py`. If a step has no more tokens than sequences, a unit of decoding
is one token instead of a sequence, and decoding takes all of them.

Softmax, ssa, softpick and the pointwise normalizers take one kernel, `decode_stream`. Adaptive softmax and entmax take
three: `decode_observe` reads the keys and stores the logits in scratch memory, `solve.py` finds each row's temperature
or threshold from the logits, and `decode_settled` reads the values (under entmax only those of keys with a weight in
some row).

Scratch memory, float32 (rows = tokens that may be decoded here * q_heads):
    sums      [items, tokens of a unit, q_heads, 8]: peak, total, weighted_log, highest, lowest, visible, support, and
              opposed (softpick only), as in `normalizers.py`
    outputs   [items, tokens of a unit, q_heads, value_dim]
    logits    [rows, max_blocks * block_size], -infinity where a key is not seen
    solution  [rows, 3]: peak, inverse temperature or tau, and the weight of the sink relative to those of the keys
"""

import triton
import triton.language as tl

from sharp.plugins.triton.loads import (
    blocks_of,
    cache_of,
    every_block_mapped,
    head_values,
    length_term,
    load_pages,
    load_query,
    load_values,
    row_numbers,
)
from sharp.plugins.triton.normalizers import (
    add_values,
    added_up,
    empty_state,
    logit_factor,
    settled,
)
from sharp.plugins.triton.plan import item_of
from sharp.plugins.triton.rows import decode_rows, row_bounds, rows_left, scratch_row, split_bounds, split_row
from sharp.plugins.triton.walk import walk

INTEGERS = (
    "sequences",
    "q_heads",
    "kv_heads",
    "max_blocks",
    "slots",
    "most_tokens",
    "units",
    "window",
    "causal",
    "parameters",
)


@triton.jit
def store_sums(
    sums,
    index,
    exists,
    state,
    scale,
    OPTIONS: tl.constexpr,
    OBSERVED: tl.constexpr,
    WEIGHED: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Store the sums of a split in the rows `index` of `sums` [.., 8], for rows that exist; logits get their factor.

    `state` is a walk's state, added up. Columns 0 to 2 are always stored: peak, total, weighted_log. OBSERVED: 5
    (visible), and with STATISTICS 3 and 4 (highest, lowest). WEIGHED and STATISTICS: 6 (support). Softpick: 7
    (opposed).
    """
    peak, total, weighted_log, highest, lowest, visible, support, _, opposed = state
    if OBSERVED:
        factor = logit_factor(scale, OPTIONS)
        highest, lowest = (peak if OPTIONS.peak_is_highest else highest) * factor, lowest * factor
        peak = peak if OPTIONS.peak_of_exponents else peak * factor
    place = sums + index * 8
    tl.store(place, peak, mask=exists)
    tl.store(place + 1, total, mask=exists)
    tl.store(place + 2, weighted_log, mask=exists)
    if OBSERVED:
        tl.store(place + 5, visible, mask=exists)
    if OBSERVED and STATISTICS:
        tl.store(place + 3, highest, mask=exists)
        tl.store(place + 4, lowest, mask=exists)
    if WEIGHED and STATISTICS:
        tl.store(place + 6, support, mask=exists)
    if OPTIONS.normalizer == "softpick":
        tl.store(place + 7, opposed, mask=exists)


@triton.jit
def collects(collect_stats, OPTIONS: tl.constexpr):
    """Return whether statistics are requested: the bool that `collect_stats` points to, if `OPTIONS.statistics`.

    Kernels have one loop with statistics and one without, where they cost nothing.
    """
    collect = False
    if OPTIONS.statistics:
        collect = tl.load(collect_stats).to(tl.int32) != 0
    return collect


@triton.jit
def full_tiles(low, high, begins, ends, exists, cache, OPTIONS: tl.constexpr):
    """Return the bounds of a walk over a split's keys [low, high): (low, full_low, full_high, high).

    Between full_low and full_high every row that exists sees every key, and every key has a block, so that tiles need
    no masks. The rows see the keys [begins, ends); `cache` is the walk's.
    """
    first, last = tl.max(tl.where(exists, begins, 0)), tl.min(tl.where(exists, ends, high))
    full_low = tl.maximum(low, (first + OPTIONS.keys - 1) // OPTIONS.keys * OPTIONS.keys)
    full_high = tl.minimum(last, high) // OPTIONS.keys * OPTIONS.keys
    full = (full_low < full_high) & every_block_mapped(low, high, cache, OPTIONS)
    return low, tl.where(full, full_low, low), tl.where(full, full_high, low), high


@triton.jit
def observe_split(
    bounds,
    source,
    stored,
    sums,
    outputs,
    index,
    OPTIONS: tl.constexpr,
    MODE: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Walk a split's keys, and store the sums (and the output, if values are weighed) at the rows `index`.

    MODE is "observe", which stores the logits and weighs no values, or "stream". `bounds`, `source` and `stored` are
    those of `walk`.
    """
    ALONE: tl.constexpr = MODE == "observe"
    exists, scale = stored[1], source[3][0]
    state = walk(bounds, source, (0.0, 0.0), stored, OPTIONS, MODE, "all", STATISTICS, ALONE)
    state = added_up(state, logit_factor(scale, OPTIONS), OPTIONS, ALONE)
    peak, total, weighted_log, highest, lowest, visible, support, output, opposed = state
    visible += (bounds[2] - bounds[1]).to(tl.float32)  # a walk counts the keys of tiles with masks only
    state = (peak, total, weighted_log, highest, lowest, visible, support, output, opposed)
    store_sums(sums, index, exists, state, scale, OPTIONS, True, not ALONE, STATISTICS)
    if not ALONE:
        store_output(outputs, index, exists, state[7], OPTIONS)


@triton.jit
def store_output(outputs, index, exists, output, OPTIONS: tl.constexpr):
    """Store a split's share of the output [rows, value_width], before the division by the sum of weights.

    `outputs` points to float32 [.., value_dim], of which the rows `index` are written where a row `exists`.
    """
    channels = tl.arange(0, OPTIONS.value_width)
    inside = exists[:, None] & (channels < OPTIONS.value_dim)[None, :]
    tl.store(outputs + index[:, None] * OPTIONS.value_dim + channels[None, :], output, mask=inside)


@triton.jit(do_not_specialize=INTEGERS)
def decode_stream(
    query,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    block_table,
    query_start,
    context_lens,
    head_params,
    alibi_slopes,
    collect_stats,
    plan,
    sums,
    outputs,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    units,
    parameters,
    window,
    causal,
    scale,
    softcap,
    OPTIONS: tl.constexpr,
):
    """Compute a split in one pass over its keys and values. Grid: work items, KV heads * row blocks.

    The split's sums and share of the output are written to scratch memory: `sums` [items, tokens of a unit, q_heads, 8]
    and `outputs` [items, tokens of a unit, q_heads, value_dim]. A program without keys writes nothing.
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
    slope, b, n = head_values(head_params, alibi_slopes, heads, exists, parameters, OPTIONS)
    begins, ends = row_bounds(position + tokens, end, window, causal)
    row = (position + tokens, begins, ends, slope, b, n)
    tensors = (key_cache, value_cache, key_scale, value_scale)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    if OPTIONS.pointwise:
        row = (position + tokens, begins, ends, slope, length_term(row, cache, parameters, OPTIONS), n)
    rows = load_query(query, row_numbers(first, count, tokens, heads, q_heads, OPTIONS), exists, OPTIONS)
    source = (rows, row, cache, (scale, softcap, 0.0))
    bounds, stored = full_tiles(low, high, begins, ends, exists, cache, OPTIONS), (0.0, exists)
    index = split_row(item, tokens, most_tokens, q_heads, heads)
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            observe_split(bounds, source, stored, sums, outputs, index, OPTIONS, "stream", True)
    else:
        observe_split(bounds, source, stored, sums, outputs, index, OPTIONS, "stream", False)


@triton.jit(do_not_specialize=INTEGERS)
def decode_observe(
    query,
    key_cache,
    key_scale,
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
    window,
    causal,
    scale,
    softcap,
    OPTIONS: tl.constexpr,
):
    """Store the logits of a split, and the sums that the solution is found from.

    Grid: work items, KV heads * row blocks. Scratch memory: `logits` float32 [rows, max_blocks * block_size], -infinity
    where a key is not seen, and `sums` [items, tokens of a unit, q_heads, 8].
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
    row = (position + tokens, begins, ends, slope, b, n)
    tensors = (key_cache, key_cache, key_scale, key_scale)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    rows = load_query(query, row_numbers(first, count, tokens, heads, q_heads, OPTIONS), exists, OPTIONS)
    source = (rows, row, cache, (scale, softcap, 0.0))
    bounds = full_tiles(low, high, begins, ends, exists, cache, OPTIONS)
    own = scratch_row(unit, tokens, most_tokens, q_heads, heads)
    stored = (logits + own * max_blocks * OPTIONS.block_size, exists)
    index = split_row(item, tokens, most_tokens, q_heads, heads)
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            observe_split(bounds, source, stored, sums, sums, index, OPTIONS, "observe", True)
    else:
        observe_split(bounds, source, stored, sums, sums, index, OPTIONS, "observe", False)


@triton.jit
def weigh_stored(
    low, high, begin, end, cache, stored, solution, alpha, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr
):
    """Return a walk's state, added up, after the stored logits of the keys [low, high).

    `stored` is (pointers [rows] to the logits of key 0, whether the rows exist), `solution` the rows' peak and inverse
    temperature or tau. Only values of keys in [begin, end) are read, under entmax only of keys that some row gives a
    weight.
    """
    peak, total, weighted_log, highest, lowest, visible, support, output, opposed = empty_state(OPTIONS, False)
    pointers, exists = stored
    # Under entmax no matrix product directly follows a load, so Triton would not prefetch logits by itself.
    AHEAD: tl.constexpr = 4 if OPTIONS.normalizer == "entmax" else None
    for tile in tl.range(low // OPTIONS.keys, (high + OPTIONS.keys - 1) // OPTIONS.keys, num_stages=AHEAD):
        start = tile * OPTIONS.keys
        keys = start + tl.arange(0, OPTIONS.keys)
        inside = exists[:, None] & (keys // OPTIONS.block_size < blocks_of(cache[6], OPTIONS))[None, :]
        logits = tl.load(pointers[:, None] + keys[None, :], mask=inside, other=-float("inf"))
        sums = (total, weighted_log, support)
        weights, sums = settled(logits, solution, 1.0, alpha, sums, OPTIONS, STATISTICS)
        total, weighted_log, support = sums
        if OPTIONS.normalizer == "entmax":
            # `!= 0` and not `> 0`: a NaN must reach the output.
            weighed = (weights != 0).to(tl.int32)
            if tl.max(weighed) > 0:
                needed = tl.max(weighed, 0) > 0
                values, scales = values_of(start, needed, begin, end, cache, OPTIONS)
                output = add_values(output, weights, values, scales, OPTIONS)
        else:
            values, scales = values_of(start, keys >= 0, begin, end, cache, OPTIONS)
            output = add_values(output, weights, values, scales, OPTIONS)
    state = (peak, total, weighted_log, highest, lowest, visible, support, output, opposed)
    return added_up(state, 1.0, OPTIONS, False)


@triton.jit
def values_of(start, needed, begin, end, cache, OPTIONS: tl.constexpr):
    """Return values [keys, value_width] and scales [keys] of the tile's keys that are `needed` [keys] and seen.

    The tile begins at the key `start`. A key is seen if it has a block and lies in [begin, end). Other keys have the
    value 0.
    """
    keys = start + tl.arange(0, OPTIONS.keys)
    page = load_pages(start, cache, OPTIONS, False)
    return load_values(start, needed & (page >= 0) & (keys >= begin) & (keys < end), page, cache, OPTIONS, False)


@triton.jit(do_not_specialize=INTEGERS)
def decode_settled(
    value_cache,
    value_scale,
    block_table,
    query_start,
    context_lens,
    collect_stats,
    plan,
    sums,
    logits,
    solution,
    outputs,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    units,
    window,
    causal,
    alpha,
    OPTIONS: tl.constexpr,
):
    """Weigh a split's values by weights from the stored logits and the solution.

    Grid: work items, KV heads * row blocks. `logits` and `solution` are what `decode_observe` and `decode_solve`
    stored. The split's columns 0 to 2 and 6 of `sums`, and its `outputs`, are written.
    """
    item = tl.program_id(0)
    unit, split, most = item_of(plan, units, query_start, sequences, most_tokens, item)
    sequence, _, count, _, _ = unit
    if rows_left(count, q_heads, kv_heads, most_tokens, OPTIONS) < 1:
        return
    _, begin, end, low, high, _ = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, split, most, OPTIONS
    )
    if low >= high:
        return
    kv_head, heads, tokens, exists = decode_rows(count, q_heads, kv_heads, most_tokens, OPTIONS)
    tensors = (value_cache, value_cache, value_scale, value_scale)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    own = scratch_row(unit, tokens, most_tokens, q_heads, heads)
    stored = (logits + own * max_blocks * OPTIONS.block_size, exists)
    peak = tl.load(solution + own * 3, mask=exists, other=0.0)
    solved = tl.load(solution + own * 3 + 1, mask=exists, other=0.0)
    index = split_row(item, tokens, most_tokens, q_heads, heads)
    bounds, found = (low, high, begin, end), (sums, outputs)
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            settle_split(bounds, cache, stored, (peak, solved), alpha, found, index, OPTIONS, True)
    else:
        settle_split(bounds, cache, stored, (peak, solved), alpha, found, index, OPTIONS, False)


@triton.jit
def settle_split(bounds, cache, stored, solution, alpha, found, index, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr):
    """Weigh a split's values, and store the sums and the output at the rows `index`.

    `bounds` is (low, high, begin, end): the split's keys, and the keys whose values may be read. `found` is (sums,
    outputs).
    """
    low, high, begin, end = bounds
    sums, outputs = found
    state = weigh_stored(low, high, begin, end, cache, stored, solution, alpha, OPTIONS, STATISTICS)
    _, total, weighted_log, highest, lowest, visible, support, output, opposed = state
    # All splits have the same peak, so the merge needs no peak: 0 stands for it.
    none = tl.full([OPTIONS.rows], 0, tl.float32)
    state = (none, total, weighted_log, highest, lowest, visible, support, output, opposed)
    store_sums(sums, index, stored[1], state, 1.0, OPTIONS, False, True, STATISTICS)
    store_output(outputs, index, stored[1], output, OPTIONS)
