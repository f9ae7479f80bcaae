"""Decoding: sequences of one token or few, their keys split over programs; `merge.py` puts the splits together.

Which keys a program has is its work item, in the plan that the first kernel makes (`plan.py`).

Query heads that share a KV head are the rows of one tile, and so are the tokens of a sequence, up to `most_tokens`:
keys and values are read once for all of them. Where a tile has too few rows, such as for 4 tokens and groups of 8
heads, other programs have the rest at about the same time, and find keys and values in the second-level cache.
Sequences with more tokens are left to `prefill.py`, but not where a step has no more tokens than sequences: what is
decoded together, a unit, is then one token.

Softmax, ssa, softpick and the pointwise normalizers take one kernel, `decode_stream`. Adaptive softmax and entmax take
three: `decode_observe` reads the keys and leaves the logits in scratch memory, `solve.py` finds each row's
temperature or threshold from them, `decode_settled` reads the values, under entmax only of keys that some row gives a
weight.

Scratch memory, float32 (rows = tokens that may be decoded here * q_heads):
    sums      [items, tokens of a unit, q_heads, 8]: peak, total, weighted_log, highest, lowest, visible, support, and
              of softpick opposed, of `normalizers.py`
    outputs   [items, tokens of a unit, q_heads, value_dim]
    logits    [rows, max_blocks * block_size], -infinity where a key is not seen
    solution  [rows, 3]: peak, inverse temperature or tau, and the weight of the sink beside those of the keys
"""

import triton
import triton.language as tl

from sharp.plugins.triton.loads import (
    blocks_of,
    cache_of,
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
    """What a split has found: `OBSERVED` the logits, `WEIGHED` the weights, or both."""
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
    """Whether statistics are requested: kernels have a loop with them and one without, in which they cost nothing."""
    collect = False
    if OPTIONS.statistics:
        collect = tl.load(collect_stats).to(tl.int32) != 0
    return collect


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
    """Walk a split's keys, and store what comes of it at the rows `index`."""
    ALONE: tl.constexpr = MODE == "observe"
    exists, scale = stored[1], source[3][0]
    state = walk(bounds, source, (0.0, 0.0), stored, OPTIONS, MODE, "none", STATISTICS, ALONE)
    state = added_up(state, logit_factor(scale, OPTIONS), OPTIONS, ALONE)
    store_sums(sums, index, exists, state, scale, OPTIONS, True, not ALONE, STATISTICS)
    if not ALONE:
        store_output(outputs, index, exists, state[7], OPTIONS)


@triton.jit
def store_output(outputs, index, exists, output, OPTIONS: tl.constexpr):
    """A split's share of the output, before the division."""
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
    """One pass over the keys and values of a split. Grid: work items, KV heads * row blocks."""
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
    bounds, stored = (low, low, low, high), (0.0, exists)
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
    """The logits of a split into scratch memory, and what the solution is found from. Grid as `decode_stream`."""
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
    source, bounds = (rows, row, cache, (scale, softcap, 0.0)), (low, low, low, high)
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
    """The state after the stored logits of the keys [low, high); values are read where a weight is not 0."""
    peak, total, weighted_log, highest, lowest, visible, support, output, opposed = empty_state(OPTIONS, False)
    pointers, exists = stored
    # Under entmax no matrix product follows a load at once, and Triton would fetch no logits ahead by itself.
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
    """Values [keys, value_width] and scales of the tile's keys that are `needed` and seen."""
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
    """Weights from the stored logits and the solution, and the values. Grid as `decode_stream`."""
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
    """Weigh a split's values, and store what comes of it at the rows `index`."""
    low, high, begin, end = bounds
    sums, outputs = found
    state = weigh_stored(low, high, begin, end, cache, stored, solution, alpha, OPTIONS, STATISTICS)
    _, total, weighted_log, highest, lowest, visible, support, output, opposed = state
    # All splits have the same peak: what is merged has none.
    none = tl.full([OPTIONS.rows], 0, tl.float32)
    state = (none, total, weighted_log, highest, lowest, visible, support, output, opposed)
    store_sums(sums, index, stored[1], state, 1.0, OPTIONS, False, True, STATISTICS)
    store_output(outputs, index, stored[1], output, OPTIONS)
