"""Prompts and chunks of prompts: every sequence that `decode.py` leaves, in tiles of query rows times keys.

The rows of a tile are (token, head) pairs that share a KV head, numbered token * group + head of the group, so that a
chunk of few tokens still fills a tile. Tiles that no row sees are skipped. Passes over the keys:
    softmax, ssa, softpick, pointwise  one; ssa repeats it if weights left float32's range
    adaptive softmax  two: entropy, then weights
    entmax            one for the maximum and an estimate of the threshold, one for each further step, mostly two, until
                      all rows of the tile have settled, and one for the output. All passes but the first skip tiles
                      whose keys no row can give a weight. At alpha 1.5 in bfloat16 the output follows after one step,
                      and both are repeated if the sum of the output's weights is off
If a step has so few tiles that most of the device would idle, such as for a question about a long text that is already
in the cache, the keys are split over programs as in decoding, and `merge.py` merges the parts. Normalizers of one pass
are split here, adaptive softmax and entmax in `split_prefill.py`.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.decode import collects, store_output, store_sums
from sharp.plugins.triton.entmax import (
    entmax_bracket,
    entmax_missed,
    entmax_near,
    entmax_sink,
    entmax_sink_sums,
    entmax_step,
    entmax_unsettled,
)
from sharp.plugins.triton.loads import (
    cache_of,
    context_of,
    every_block_mapped,
    head_values,
    keys_of,
    length_term,
    load_query,
    row_numbers,
    sink_of,
    visible_keys,
)
from sharp.plugins.triton.normalizers import (
    divided,
    logit_factor,
    row_statistics,
    sink_weight,
    temperature,
    within_range,
)
from sharp.plugins.triton.rows import row_bounds, rows_of_part
from sharp.plugins.triton.solve import MOST_STEPS
from sharp.plugins.triton.walk import aim, walk

INTEGERS = (
    *("sequences", "q_heads", "kv_heads", "max_blocks", "slots", "most_tokens", "parts", "parameters", "columns"),
    *("window", "causal"),
)


@triton.jit
def sequence_of_tile(query_start, sequences, tile, group, OPTIONS: tl.constexpr):
    """Return the sequence of a tile by bisection: sequence i's tiles start at i + query_start[i] * group // rows.

    `group` is the number of query heads per KV head. That leaves every sequence room for a last tile that is not full.
    Tiles behind it find no row and end at once.
    """
    low = tile * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start + middle) * group // OPTIONS.rows + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    return low


@triton.jit
def entmax_thresholds(bounds, source, listed, peak, sink_s, tau, estimate, visible, exists, OPTIONS: tl.constexpr):
    """Return the thresholds of all rows, starting at `tau`; the steps end when no row of the tile needs another.

    `bounds` and `source` are those of `walk`, `listed` is (pointer to a list of tiles, its length). `peak`, `sink_s`
    (`entmax_sink`), `visible` (numbers of keys) and `exists` are [rows]. With `estimate` a rough threshold is enough.
    """
    alpha = source[3][2]
    low, high, top = entmax_bracket(visible, sink_s, alpha)
    tau = tl.where(tau > low, tl.minimum(tau, high), low)  # a NaN becomes `low`, too
    step = 0
    while step < MOST_STEPS:
        state = walk(bounds, source, (peak, tau), listed, OPTIONS, "count", "listed", False)
        _, total, slope, _, _, _, support, _, _ = state
        add_total, add_slope, add_support = entmax_sink_sums(tau, sink_s, alpha, OPTIONS)
        total += add_total
        sums = (total, slope + add_slope, support + add_support)
        following, low, high = entmax_step(tau, low, high, top, sums, alpha, OPTIONS)
        unsettled = entmax_unsettled(following, tau, total, estimate, alpha, OPTIONS) & exists & (visible > 0)
        step = tl.where(tl.max(unsettled.to(tl.int32)) > 0, step + 1, MOST_STEPS)
        tau = following
    return tau


@triton.jit
def attend_entmax(bounds, source, sink, tiles, exists, visible, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr):
    """Return the state of a tile's rows after all keys under entmax, and the weights of their sinks, [rows].

    `tiles` points to scratch memory for a list of tiles. `sink` are the logits of the sinks, `visible` the numbers of
    visible keys, [rows] each. The state's `highest` is the peak.
    """
    state, count = aim(bounds, source, tiles, exists, 0.0, OPTIONS, STATISTICS, False)
    peak, total, slope, _, lowest, distance, support, output, opposed = state
    nearer = entmax_near(distance, (total, slope, support), source[3][2], OPTIONS)
    tau = tl.where(total > 1, nearer, 0.0) - distance
    alpha = source[3][2]
    sink_s = entmax_sink(sink, peak * logit_factor(source[3][0], OPTIONS), alpha)
    weighted_log, of_sink = slope, total  # placeholders of the right type, which the loop replaces
    estimate = OPTIONS.estimates
    settling = True
    while settling:
        tau = entmax_thresholds(bounds, source, (tiles, count), peak, sink_s, tau, estimate, visible, exists, OPTIONS)
        state = walk(bounds, source, (peak, tau), (tiles, count), OPTIONS, "settled", "listed", STATISTICS)
        _, total, weighted_log, _, _, _, support, output, _ = state
        of_sink = entmax_sink_sums(tau, sink_s, alpha, OPTIONS)[0]
        missed = entmax_missed(total + of_sink) & exists & (visible > 0)
        settling = estimate & (tl.max(missed.to(tl.int32)) > 0)
        estimate = False
    return (peak, total, weighted_log, peak, lowest, visible, support, output, opposed), of_sink


@triton.jit
def attend_tile(
    bounds, source, sink, polynomial, tiles, exists, visible, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr
):
    """Return the state of a tile's rows after all keys, their inverse temperatures, and the weights of their sinks.

    The state is (peak, total, weighted_log, highest, lowest, visible, support, output, opposed), with logits without
    their factor. Inverse temperatures and weights are [rows]; the former are 1 except under adaptive softmax.

    `bounds` is (low, full_low, full_high, high) and `source` (query parts, row, cache, (scale, softcap, alpha)), as for
    `walk`. `sink` are the logits of the sinks, -infinity for none, `visible` the numbers of visible keys, `exists`
    whether there is a row, [rows] each. `polynomial` is (entropy threshold, t0, ..., t7). `tiles` points to scratch
    memory for a list of tiles, which entmax alone uses.
    """
    unused = (0.0, 0.0)
    beta = tl.full([OPTIONS.rows], 0, tl.float32) + 1.0
    if OPTIONS.solves:
        if OPTIONS.normalizer == "entmax":
            state, of_sink = attend_entmax(bounds, source, sink, tiles, exists, visible, OPTIONS, STATISTICS)
            peak, total, weighted_log, highest, lowest, _, support, output, opposed = state
        else:
            state = walk(bounds, source, unused, unused, OPTIONS, "observe", "all", STATISTICS)
            peak, total, weighted_log, highest, lowest, _, _, _, opposed = state
            threshold, t0, t1, t2, t3, t4, t5, t6, t7 = polynomial
            beta = temperature(total, weighted_log, threshold, t0, t1, t2, t3, t4, t5, t6, t7)
            state = walk(bounds, source, (peak, beta), unused, OPTIONS, "settled", "all", STATISTICS)
            _, total, weighted_log, _, _, _, support, output, _ = state
            highest = peak
            of_sink = sink_weight(sink, peak * logit_factor(source[3][0], OPTIONS) * beta, beta, beta, OPTIONS)
    else:
        # The faster loop exists only without statistics: steps with statistics are few, and two loops in each branch
        # would take twice as long to compile.
        FIXED: tl.constexpr = OPTIONS.rarely_shifted and not STATISTICS
        state = walk(bounds, source, unused, unused, OPTIONS, "fixed" if FIXED else "stream", "all", STATISTICS)
        if FIXED:
            lost = exists & (visible > 0) & ~within_range(state[1], state[7])
            if tl.max(lost.to(tl.int32)) > 0:
                state = walk(bounds, source, unused, unused, OPTIONS, "stream", "all", STATISTICS)
        peak, total, weighted_log, highest, lowest, _, support, output, opposed = state
        if FIXED:  # unshifted weights have the peak 0, except in rows without any, which must not limit another part's
            peak = tl.where((peak == -float("inf")) & (total != 0), 0.0, peak)
        if OPTIONS.peak_is_highest:
            highest = peak
        of_sink = total * 0.0
        if not OPTIONS.pointwise:
            _, _, _, _, b, n = source[1]
            level = peak if OPTIONS.peak_of_exponents else peak * logit_factor(source[3][0], OPTIONS)
            of_sink = sink_weight(sink, level, b, n, OPTIONS)
    return (peak, total, weighted_log, highest, lowest, visible, support, output, opposed), beta, of_sink


@triton.jit
def store_tile(tensors, rows, exists, state, beta, of_sink, scale, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr):
    """Store the output and, with STATISTICS, the statistics of the rows with these numbers, where they `exist`.

    `tensors` is (output, stats, sums, outputs, columns), of which the first two are written; `state`, `beta` and
    `of_sink` are the results of `attend_tile`.
    """
    output, stats, _, _, columns = tensors
    _, total, weighted_log, highest, lowest, visible, support, weighted, opposed = state
    channels = tl.arange(0, OPTIONS.value_width)
    inside = exists[:, None]
    if OPTIONS.value_width != OPTIONS.value_dim:
        inside = inside & (channels < OPTIONS.value_dim)[None, :]
    at = output + rows[:, None] * OPTIONS.value_dim + channels[None, :]
    tl.store(
        at, divided(weighted, total + opposed + of_sink, visible, OPTIONS).to(output.dtype.element_ty), mask=inside
    )
    if STATISTICS:
        factor = logit_factor(scale, OPTIONS)
        entropy, keys, beta, spread, mass = row_statistics(
            total, opposed, weighted_log, highest * factor, lowest * factor, visible, support, beta, of_sink, OPTIONS
        )
        at = stats + rows * columns
        tl.store(at, entropy, mask=exists)
        tl.store(at + 1, keys, mask=exists)
        tl.store(at + 2, beta, mask=exists)
        tl.store(at + 3, spread, mask=exists)
        tl.store(at + 4, mass, mask=exists & (columns > 4))


@triton.jit
def store_found(
    tensors, rows, exists, parts, state, beta, of_sink, scale, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr
):
    """Store the result of a tile's rows, or with several `parts` the sums of this program's part of their keys.

    `tensors` is (output, stats, sums, outputs, columns): the first two get results, the next two a part's sums.
    """
    if OPTIONS.solves or parts == 1:
        store_tile(tensors, rows, exists, state, beta, of_sink, scale, OPTIONS, STATISTICS)
    else:
        _, _, sums, outputs, _ = tensors
        index = rows * parts + tl.program_id(2)
        store_sums(sums, index, exists, state, scale, OPTIONS, True, True, STATISTICS)
        store_output(outputs, index, exists, state[7], OPTIONS)


@triton.jit
def tile_of_program(query_start, sequences, group, OPTIONS: tl.constexpr):
    """Return a program's tile: its sequence, the sequence's first token and number of tokens, and the tile's first row.

    For a tile behind the last one the first row lies behind the sequence's rows.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prompt have the most keys: they start first
    sequence = sequence_of_tile(query_start, sequences, tile, group, OPTIONS)
    first_token = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first_token
    return sequence, first_token, count, (tile - (first_token * group // OPTIONS.rows + sequence)) * OPTIONS.rows


@triton.jit
def rows_of_tile(tile, lengths, of_heads, q_heads, kv_heads, max_blocks, window, causal, OPTIONS: tl.constexpr):
    """Return the rows of a tile: their numbers, whether they exist, their heads, and a walk's `row` over all keys.

    `tile` is the result of `tile_of_program`, `lengths` is (context_lens, block_table), `of_heads` is (head_params,
    alibi_slopes, parameters). The numbers (int64) are those in queries, outputs and statistics.
    """
    sequence, first_token, count, first = tile
    context_lens, block_table = lengths
    head_params, alibi_slopes, parameters = of_heads
    group = q_heads // kv_heads
    member = first + tl.arange(0, OPTIONS.rows)
    exists = member < count * group
    member = tl.minimum(member, count * group - 1)
    heads = tl.program_id(1) * group + member % group
    rows = row_numbers(first_token, count, member // group, heads, q_heads, OPTIONS)
    context = context_of(context_lens, sequence, max_blocks, OPTIONS)
    total = keys_of(block_table, sequence, context, count, max_blocks, OPTIONS)
    position = context + member // group
    begin, end = row_bounds(position, total, window, causal)
    slope, b, n = head_values(head_params, alibi_slopes, heads, exists, parameters, OPTIONS)
    return rows, exists, heads, (position, begin, end, slope, b, n)


@triton.jit
def part_of_tile(
    row,
    caches,
    block_table,
    sequence,
    max_blocks,
    slots,
    kv_heads,
    part,
    parts,
    OPTIONS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Return a walk's `bounds`, `row` and `cache` for a part of a tile's keys, and whether all keys have a block.

    `row` is a walk's over all keys, `caches` (key_cache, value_cache, key_scale, value_scale). Without SPLIT the part
    is all keys, and `part` and `parts` are not read.
    """
    position, begin, end, slope, b, n = row
    if SPLIT:
        begin, end = rows_of_part(begin, end, part, parts, OPTIONS)
    low = tl.min(begin) // OPTIONS.keys * OPTIONS.keys
    high = tl.max(end)
    EACH: tl.constexpr = OPTIONS.listed_keys if OPTIONS.normalizer == "entmax" else OPTIONS.keys
    full_low = (tl.max(begin) + EACH - 1) // EACH * EACH
    full_high = tl.min(end) // EACH * EACH
    row = (position, begin, end, slope, b, n)
    kv_head = tl.program_id(1)
    cache = cache_of(caches, block_table, sequence, max_blocks, slots, tl.min(begin), high, kv_head, kv_heads, OPTIONS)
    mapped = every_block_mapped(tl.min(begin), high, cache, OPTIONS)
    full_high = tl.where(mapped, full_high, 0)
    none_full = full_low >= full_high
    full_low = tl.where(none_full, low, full_low)
    full_high = tl.where(none_full, low, full_high)
    return (low, full_low, full_high, high), row, cache, mapped


@triton.jit(do_not_specialize=INTEGERS)
def prefill(
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
    output,
    stats,
    sums,
    outputs,
    tiles,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    parts,
    parameters,
    columns,
    window,
    causal,
    scale,
    softcap,
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
    OPTIONS: tl.constexpr,
):
    """Compute the tiles of prompts. Grid: tiles, KV heads, parts; there are tokens * group // rows + sequences tiles.

    Scratch memory for entmax: `tiles`, int32 [KV heads, tiles, the longest context in `listed_keys` + 1]. With several
    parts: `sums` and `outputs` as in `decode.py`, for all rows: [tokens * query heads, parts, ...].
    """
    group = q_heads // kv_heads
    tile = tile_of_program(query_start, sequences, group, OPTIONS)
    sequence, _, count, first = tile
    if count <= most_tokens:
        return
    if first >= count * group:
        return
    lengths, of_heads = (context_lens, block_table), (head_params, alibi_slopes, parameters)
    rows, exists, heads, row = rows_of_tile(
        tile, lengths, of_heads, q_heads, kv_heads, max_blocks, window, causal, OPTIONS
    )
    caches = (key_cache, value_cache, key_scale, value_scale)
    if OPTIONS.pointwise:
        position, begin, end, slope, _, n = row
        low, high = tl.min(begin), tl.max(end)
        cache = cache_of(
            caches, block_table, sequence, max_blocks, slots, low, high, tl.program_id(1), kv_heads, OPTIONS
        )
        row = (position, begin, end, slope, length_term(row, cache, parameters, OPTIONS), n)
    part = tl.program_id(2)
    bounds, row, cache, mapped = part_of_tile(
        row, caches, block_table, sequence, max_blocks, slots, kv_heads, part, parts, OPTIONS, not OPTIONS.solves
    )
    sink = sink_of(head_params, heads, exists, parameters, OPTIONS)
    loaded = load_query(query, rows, exists, OPTIONS)
    visible = visible_keys(bounds[0], bounds[3], mapped, row, cache, OPTIONS)
    source = (loaded, row, cache, (scale, softcap, alpha))
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tiles += program.to(tl.int64) * (tl.cdiv(max_blocks * OPTIONS.block_size, OPTIONS.listed_keys) + 1)
    polynomial = (entropy_threshold, t0, t1, t2, t3, t4, t5, t6, t7)
    tensors = (output, stats, sums, outputs, columns)
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            state, beta, of_sink = attend_tile(bounds, source, sink, polynomial, tiles, exists, visible, OPTIONS, True)
            store_found(tensors, rows, exists, parts, state, beta, of_sink, scale, OPTIONS, True)
    else:
        state, beta, of_sink = attend_tile(bounds, source, sink, polynomial, tiles, exists, visible, OPTIONS, False)
        store_found(tensors, rows, exists, parts, state, beta, of_sink, scale, OPTIONS, False)
