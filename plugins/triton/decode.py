"""Decoding: sequences of one token or few, their keys split over programs; `merge.py` puts the splits together.

Query heads that share a KV head are the rows of one tile, and so are the tokens of a sequence as far as the tile has
room (`most_tokens`, such as 4 for groups of 4 heads): keys and values are read once for all of them. Sequences with
more tokens are left to `prefill.py`, but not where a step has no more tokens than sequences: what is decoded together,
a unit, is then one token. The number of splits follows from shapes; which keys a split has follows from the
sequence's length, read here.

Softmax, ssa, softpick and the pointwise normalizers take one kernel, `decode_stream`. Adaptive softmax and entmax take
three: `decode_observe` reads the keys and leaves the logits in scratch memory, `decode_solve` finds each row's
temperature or threshold from them, `decode_settled` reads the values, under entmax only of keys that some row gives a
weight.

Scratch memory, float32 (rows = tokens that may be decoded here * q_heads):
    sums      [rows, splits, 8]: peak, total, weighted_log, highest, lowest, visible, support, and of softpick opposed,
              of `normalizers.py`
    outputs   [rows, splits, value_dim]
    logits    [rows, max_blocks * block_size], -infinity where a key is not seen
    solution  [rows, 3]: peak, inverse temperature or tau, and the weight of the sink beside those of the keys
"""

import triton
import triton.language as tl

from sharp.plugins.triton.entmax import (
    entmax_bracket,
    entmax_excess,
    entmax_sink,
    entmax_sink_sums,
    entmax_step,
    entmax_sums,
    entmax_unsettled,
)
from sharp.plugins.triton.loads import (
    blocks_of,
    cache_of,
    head_values,
    length_term,
    load_pages,
    load_query,
    load_values,
    row_numbers,
    sink_of,
)
from sharp.plugins.triton.normalizers import (
    add_values,
    added_up,
    empty_state,
    logit_factor,
    settled,
    sink_weight,
    temperature,
)
from sharp.plugins.triton.rows import decode_rows, row_bounds, scratch_row, split_bounds, unit_of
from sharp.plugins.triton.walk import walk

INTEGERS = (
    "sequences",
    "q_heads",
    "kv_heads",
    "max_blocks",
    "slots",
    "most_tokens",
    "splits",
    "window",
    "causal",
    "parameters",
)
MOST_STEPS = tl.constexpr(64)


@triton.jit
def store_sums(sums, index, exists, state, scale, OPTIONS: tl.constexpr, OBSERVED: tl.constexpr, WEIGHED: tl.constexpr):
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
        tl.store(place + 3, highest, mask=exists)
        tl.store(place + 4, lowest, mask=exists)
        tl.store(place + 5, visible, mask=exists)
    if WEIGHED:
        tl.store(place + 6, support, mask=exists)
    if OPTIONS.normalizer == "softpick":
        tl.store(place + 7, opposed, mask=exists)


@triton.jit
def walk_split(low, high, query, row, cache, attributes, stored, OPTIONS: tl.constexpr, MODE: tl.constexpr):
    """The state after a split's keys [low, high)."""
    ALONE: tl.constexpr = MODE == "observe"
    source, unused = (query, row, cache, attributes), (0.0, 0.0)
    state = walk((low, low, low, high), source, unused, stored, OPTIONS, MODE, "none", OPTIONS.statistics, ALONE)
    return added_up(state, logit_factor(attributes[0], OPTIONS), OPTIONS, ALONE)


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
    sums,
    outputs,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    splits,
    parameters,
    window,
    causal,
    scale,
    softcap,
    OPTIONS: tl.constexpr,
):
    """One pass over the keys and values of a split. Grid: units, KV heads * head blocks, splits."""
    split = tl.program_id(2)
    unit = unit_of(query_start, sequences, most_tokens, tl.program_id(0))
    sequence, first, count, _, _ = unit
    if count < 1:
        return
    position, begin, end, low, high, _ = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, split, splits, OPTIONS
    )
    if low >= high:
        return
    kv_head, heads, tokens, exists = decode_rows(count, q_heads, kv_heads, OPTIONS)
    slope, b, n = head_values(head_params, alibi_slopes, heads, exists, parameters, OPTIONS)
    begins, ends = row_bounds(position + tokens, end, window, causal)
    row = (position + tokens, begins, ends, slope, b, n)
    tensors = (key_cache, value_cache, key_scale, value_scale)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    if OPTIONS.pointwise:
        row = (position + tokens, begins, ends, slope, length_term(row, cache, parameters, OPTIONS), n)
    rows = load_query(query, row_numbers(first, count, tokens, heads, q_heads, OPTIONS), exists, OPTIONS)
    state = walk_split(low, high, rows, row, cache, (scale, softcap, 0.0), (0.0, 0.0), OPTIONS, "stream")
    index = scratch_row(unit, tokens, most_tokens, q_heads, heads) * splits + split
    store_sums(sums, index, exists, state, scale, OPTIONS, True, True)
    store_output(outputs, index, exists, state[7], OPTIONS)


@triton.jit(do_not_specialize=INTEGERS)
def decode_observe(
    query,
    key_cache,
    key_scale,
    block_table,
    query_start,
    context_lens,
    alibi_slopes,
    sums,
    logits,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    splits,
    window,
    causal,
    scale,
    softcap,
    OPTIONS: tl.constexpr,
):
    """The logits of a split into scratch memory, and what the solution is found from. Grid as `decode_stream`."""
    split = tl.program_id(2)
    unit = unit_of(query_start, sequences, most_tokens, tl.program_id(0))
    sequence, first, count, _, _ = unit
    if count < 1:
        return
    position, begin, end, low, high, _ = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, split, splits, OPTIONS
    )
    if low >= high:
        return
    kv_head, heads, tokens, exists = decode_rows(count, q_heads, kv_heads, OPTIONS)
    slope, b, n = head_values(alibi_slopes, alibi_slopes, heads, exists, 0, OPTIONS)
    begins, ends = row_bounds(position + tokens, end, window, causal)
    row = (position + tokens, begins, ends, slope, b, n)
    tensors = (key_cache, key_cache, key_scale, key_scale)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    rows = load_query(query, row_numbers(first, count, tokens, heads, q_heads, OPTIONS), exists, OPTIONS)
    index = scratch_row(unit, tokens, most_tokens, q_heads, heads)
    stored = (logits + index * max_blocks * OPTIONS.block_size, exists)
    state = walk_split(low, high, rows, row, cache, (scale, softcap, 0.0), stored, OPTIONS, "observe")
    store_sums(sums, index * splits + split, exists, state, scale, OPTIONS, True, False)


@triton.jit
def stored_entmax_sums(logits, first, end, peak, threshold, alpha, CHUNK: tl.constexpr, OPTIONS: tl.constexpr):
    """The sums (`entmax_sums`) of one row's threshold [1] over its logits in scratch memory."""
    total = tl.full([1], 0, tl.float32)
    slope = tl.full([1], 0, tl.float32)
    support = tl.full([1], 0, tl.float32)
    written = (end + 15) // 16 * 16  # more than `end`, so that the loads are vectors; blocks and tiles hold 16 and more
    for start in tl.range(first, written, CHUNK, num_stages=3):
        keys = start + tl.arange(0, CHUNK)
        row = tl.load(logits + keys, mask=keys < written, other=-float("inf"))[None, :]
        excess = entmax_excess(row, peak, threshold, alpha - 1.0)
        add_total, add_slope, add_support = entmax_sums(excess, alpha, OPTIONS)
        total += add_total
        slope += add_slope
        support += add_support
    return total, slope, support


@triton.jit(do_not_specialize=INTEGERS)
def decode_solve(
    block_table,
    query_start,
    context_lens,
    head_params,
    sums,
    logits,
    solution,
    sequences,
    q_heads,
    max_blocks,
    most_tokens,
    splits,
    parameters,
    window,
    causal,
    alpha,
    entropy_threshold,
    t0,
    t1,
    t2,
    t3,
    t4,
    t5,
    t6,
    t7,
    MOST_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """The solution of one row: inverse temperature, or entmax's tau. Grid: units * their most tokens, query heads."""
    unit = unit_of(query_start, sequences, most_tokens, tl.program_id(0) // tl.maximum(most_tokens, 1))
    token = tl.program_id(0) % tl.maximum(most_tokens, 1)
    if token >= unit[2]:
        return
    _, begin, end, _, _, active = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, 0, splits, OPTIONS
    )
    row = scratch_row(unit, token, most_tokens, q_heads, tl.program_id(1))
    split = tl.arange(0, MOST_SPLITS)
    place = sums + (row * splits + split) * 8
    peaks = tl.load(place, mask=split < active, other=-float("inf"))
    peak = tl.max(peaks, 0)
    sink = sink_of(head_params, tl.program_id(1), token < unit[2], parameters, OPTIONS)
    if OPTIONS.normalizer == "adaptive_softmax":
        totals = tl.load(place + 1, mask=split < active, other=0.0)
        weighted_logs = tl.load(place + 2, mask=split < active, other=0.0)
        total, weighted_log = merged_sums(peaks, peak, totals, weighted_logs)
        solved = temperature(total, weighted_log, entropy_threshold, t0, t1, t2, t3, t4, t5, t6, t7)
        of_sink = sink_weight(sink, peak * solved, 0.0, 0.0, OPTIONS)
    else:
        visible = tl.sum(tl.load(place + 5, mask=split < active, other=0.0), 0)
        zero = tl.full([1], 0, tl.float32)
        sink_s = entmax_sink(sink + zero, peak + zero, alpha)
        low, high, top = entmax_bracket(visible + zero, sink_s, alpha)
        tau = top - 1.0
        start = begin // OPTIONS.keys * OPTIONS.keys
        own = logits + row * max_blocks * OPTIONS.block_size
        step = 0
        while step < MOST_STEPS:
            found = stored_entmax_sums(own, start, end, peak + zero, tau, alpha, CHUNK, OPTIONS)
            total, slope, support = entmax_sink_sums(tau, sink_s, alpha, OPTIONS)
            found = (found[0] + total, found[1] + slope, found[2] + support)
            following, low, high = entmax_step(tau, low, high, top, found, alpha, OPTIONS)
            unsettled = entmax_unsettled(following, tau, found[0], False, alpha, OPTIONS)
            step = tl.where(tl.max(unsettled.to(tl.int32)) > 0, step + 1, MOST_STEPS)
            tau = following
        solved = tl.max(tau, 0)
        of_sink = tl.max(entmax_sink_sums(tau, sink_s, alpha, OPTIONS)[0], 0)
    tl.store(solution + row * 3, peak)
    tl.store(solution + row * 3 + 1, solved)
    tl.store(solution + row * 3 + 2, of_sink)


@triton.jit
def merged_sums(peaks, peak, totals, weighted_logs):
    """Totals and weighted_logs of splits, brought to one peak and added; a split's sums that are NaN stay so."""
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    moved = peaks - shift
    factor = tl.exp2(moved)
    logs = tl.where(factor == 0, 0.0, factor * (weighted_logs + moved * totals))
    return tl.sum(factor * totals, 0), tl.sum(logs, 0)


@triton.jit
def weigh_stored(low, high, begin, end, cache, stored, solution, alpha, OPTIONS: tl.constexpr):
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
        weights, sums = settled(logits, solution, 1.0, alpha, sums, OPTIONS, OPTIONS.statistics)
        total, weighted_log, support = sums
        if OPTIONS.normalizer == "entmax":
            # `!= 0` and not `> 0`: a NaN must reach the output.
            weighed = (weights != 0).to(tl.int32)
            if tl.max(weighed) > 0:
                needed = tl.max(weighed, 0) > 0
                output = add_values(output, weights, values_of(start, needed, begin, end, cache, OPTIONS), OPTIONS)
        else:
            output = add_values(output, weights, values_of(start, keys >= 0, begin, end, cache, OPTIONS), OPTIONS)
    state = (peak, total, weighted_log, highest, lowest, visible, support, output, opposed)
    return added_up(state, 1.0, OPTIONS, False)


@triton.jit
def values_of(start, needed, begin, end, cache, OPTIONS: tl.constexpr):
    """Values [keys, value_width] of the tile's keys that are `needed` and seen."""
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
    splits,
    window,
    causal,
    alpha,
    OPTIONS: tl.constexpr,
):
    """Weights from the stored logits and the solution, and the values. Grid as `decode_stream`."""
    split = tl.program_id(2)
    unit = unit_of(query_start, sequences, most_tokens, tl.program_id(0))
    sequence, _, count, _, _ = unit
    if count < 1:
        return
    _, begin, end, low, high, _ = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, split, splits, OPTIONS
    )
    if low >= high:
        return
    kv_head, heads, tokens, exists = decode_rows(count, q_heads, kv_heads, OPTIONS)
    tensors = (value_cache, value_cache, value_scale, value_scale)
    cache = cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS)
    index = scratch_row(unit, tokens, most_tokens, q_heads, heads)
    stored = (logits + index * max_blocks * OPTIONS.block_size, exists)
    peak = tl.load(solution + index * 3, mask=exists, other=0.0)
    solved = tl.load(solution + index * 3 + 1, mask=exists, other=0.0)
    state = weigh_stored(low, high, begin, end, cache, stored, (peak, solved), alpha, OPTIONS)
    _, total, weighted_log, highest, lowest, visible, support, output, opposed = state
    # All splits have the same peak: what is merged has none.
    none = tl.full([OPTIONS.rows], 0, tl.float32)
    state = (none, total, weighted_log, highest, lowest, visible, support, output, opposed)
    store_sums(sums, index * splits + split, exists, state, 1.0, OPTIONS, False, True)
    store_output(outputs, index * splits + split, exists, output, OPTIONS)
