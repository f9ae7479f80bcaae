"""Prompts whose keys are split over programs, under adaptive softmax and entmax: one launch per pass over the keys.

A key's weight depends on the logits of all parts, and only a new launch waits for all programs. The launches are
numbered, and each begins with the results of all parts in the launch before:
    prefill_observe   0: a part's running sums; for entmax its maximum, an estimate of its threshold, and which tiles of
                      keys may get a weight
    prefill_count     entmax: 1, 2, ...: the next threshold, and its sums over a part. In the last of these launches
                      one program has all parts of a tile, and goes on until the tile's rows have settled; mostly they
                      have settled before
    prefill_settled   the weights and values of a part; `merge.py` merges the parts
Every program of a tile computes the same thresholds or temperatures from the same numbers, so nothing but these numbers
is shared. Once a tile has settled, the remaining launches skip it.

Scratch memory, float32, for all rows [tokens * query heads]:
    sums     [2 or 3 sets, rows, parts, 8]: launch 0 has set 0, the others alternate between sets 1 and 2. A part's
             numbers, for logits without their `logit_factor`:
                 observe   peak, total, weighted_log or entmax's slope, entmax's -tau, lowest, visible, entmax's support
                 count     1, 2 and 6: a threshold's sums; 3: tau; 4 and 5: its bracket; 7: whether the tile's rows have
                           settled
                 settled   as in `decode.py`, with the peak 0; for adaptive softmax 6 is the inverse temperature; 7 is
                           the weight of the sink
    outputs  [rows, parts, value_dim]
    tiles    entmax, int32: for every tile and KV head the lists of its parts, each preceded by its length
"""

import triton
import triton.language as tl

from sharp.plugins.triton.decode import collects, store_output
from sharp.plugins.triton.entmax import entmax_bracket, entmax_sink
from sharp.plugins.triton.loads import load_query, sink_of, visible_keys
from sharp.plugins.triton.normalizers import logit_factor
from sharp.plugins.triton.prefill import part_of_tile, rows_of_tile, tile_of_program
from sharp.plugins.triton.rows import sums_of_launch
from sharp.plugins.triton.solve import MOST_STEPS
from sharp.plugins.triton.split_solutions import (
    adaptive_solution,
    entmax_counted,
    entmax_next,
    entmax_observed,
    entmax_solution,
)
from sharp.plugins.triton.walk import aim, walk

INTEGERS = (
    *("tokens", "sequences", "q_heads", "kv_heads", "max_blocks", "slots", "most_tokens", "parts", "stage"),
    *("parameters", "window", "causal"),
)


@triton.jit
def list_of_part(tiles, full_low, max_blocks, part, parts, OPTIONS: tl.constexpr):
    """Return the pointer to the length of a part's list of tiles, which the list follows; no two parts share a tile."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    places = tl.cdiv(max_blocks * OPTIONS.block_size, OPTIONS.listed_keys) + 2 * parts
    return tiles + program.to(tl.int64) * places + full_low // OPTIONS.listed_keys + 2 * part


@triton.jit
def seed_of_tile(whole, source, OPTIONS: tl.constexpr):
    """Return the largest logit among a tile's first and last keys; it lets a part skip tiles that it would list alone.

    Nearly all texts have their largest logits there. `whole` has a walk's bounds, row and cache over all keys.
    """
    bounds, row, cache = whole
    low, _, _, high = bounds
    behind = low + OPTIONS.keys
    last = tl.maximum((high - 1) // OPTIONS.keys * OPTIONS.keys, behind)
    unused = (0.0, 0.0)
    source = (source[0], row, cache, source[3])
    return walk((low, behind, last, high), source, unused, unused, OPTIONS, "observe", "none", False)[0]


@triton.jit
def observe_part(bounds, source, whole, listed, sums, exists, visible, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr):
    """Walk a part's keys, and store the results at `sums`, pointers [rows] to the first of the part's eight numbers.

    For entmax `listed` points to the part's list of tiles, whose length is stored first. `whole` is (bounds, row,
    cache) of a walk over the keys of all parts; `visible` [rows] the part's numbers of visible keys.
    """
    if OPTIONS.normalizer == "entmax":
        seed = seed_of_tile(whole, source, OPTIONS)
        state, count = aim(bounds, source, listed + 1, exists, seed, OPTIONS, STATISTICS, True)
        tl.store(listed, count)
        tl.store(sums + 3, state[5], mask=exists)
        tl.store(sums + 6, state[6], mask=exists)
    else:
        unused = (0.0, 0.0)
        state = walk(bounds, source, unused, unused, OPTIONS, "observe", "all", STATISTICS)
    peak, total, weighted_log, _, lowest, _, _, _, _ = state
    tl.store(sums, peak, mask=exists)
    tl.store(sums + 1, total, mask=exists)
    tl.store(sums + 2, weighted_log, mask=exists)
    tl.store(sums + 5, visible, mask=exists)
    if STATISTICS:
        tl.store(sums + 4, lowest, mask=exists)


@triton.jit(do_not_specialize=INTEGERS)
def prefill_observe(
    query,
    key_cache,
    key_scale,
    block_table,
    query_start,
    context_lens,
    alibi_slopes,
    collect_stats,
    sums,
    tiles,
    tokens,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    parts,
    stage,
    window,
    causal,
    scale,
    softcap,
    alpha,
    OPTIONS: tl.constexpr,
):
    """Store the sums of a part that the solution is found from, and for entmax its list of tiles.

    Grid: tiles, KV heads, parts. Scratch memory: `sums` [sets, tokens * q_heads, parts, 8], `tiles` int32.
    """
    tile = tile_of_program(query_start, sequences, q_heads // kv_heads, OPTIONS)
    sequence, _, count, first = tile
    if (count <= most_tokens) | (first >= count * (q_heads // kv_heads)):
        return
    lengths, of_heads = (context_lens, block_table), (alibi_slopes, alibi_slopes, 0)
    rows, exists, _, row = rows_of_tile(tile, lengths, of_heads, q_heads, kv_heads, max_blocks, window, causal, OPTIONS)
    part = tl.program_id(2)
    caches = (key_cache, key_cache, key_scale, key_scale)
    whole = (0.0, 0.0, 0.0)
    if OPTIONS.normalizer == "entmax":
        of_all, all_keys, cache, _ = part_of_tile(
            row, caches, block_table, sequence, max_blocks, slots, kv_heads, 0, 1, OPTIONS, False
        )
        whole = (of_all, all_keys, cache)
    bounds, row, cache, mapped = part_of_tile(
        row, caches, block_table, sequence, max_blocks, slots, kv_heads, part, parts, OPTIONS, True
    )
    loaded = load_query(query, rows, exists, OPTIONS)
    visible = visible_keys(bounds[0], bounds[3], mapped, row, cache, OPTIONS)
    source = (loaded, row, cache, (scale, softcap, alpha))
    own = sums_of_launch(sums, stage, tokens * q_heads, parts) + (rows * parts + part) * 8
    listed = list_of_part(tiles, bounds[1], max_blocks, part, parts, OPTIONS)
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            observe_part(bounds, source, whole, listed, own, exists, visible, OPTIONS, True)
    else:
        observe_part(bounds, source, whole, listed, own, exists, visible, OPTIONS, False)


@triton.jit
def count_parts(source, blocks, tiles, peak, tau, first_part, last_part, parts, OPTIONS: tl.constexpr):
    """Return the sums of entmax's threshold `tau` over some parts of a tile: total, slope and support, [rows] each.

    `source` is a walk's, but with the row over all keys and with the caches in place of the walk's; `blocks` is
    (block_table, sequence, max_blocks, slots, kv_heads).
    """
    loaded, row, caches, scales = source
    block_table, sequence, max_blocks, slots, kv_heads = blocks
    total, slope, support = tau * 0.0, tau * 0.0, tau * 0.0
    for part in tl.range(first_part, last_part):
        own = part_of_tile(row, caches, block_table, sequence, max_blocks, slots, kv_heads, part, parts, OPTIONS, True)
        listed = list_of_part(tiles, own[0][1], max_blocks, part, parts, OPTIONS)
        stored = (listed + 1, tl.load(listed))
        state = walk(own[0], (loaded, own[1], own[2], scales), (peak, tau), stored, OPTIONS, "count", "listed", False)
        total += state[1]
        slope += state[2]
        support += state[6]
    return total, slope, support


@triton.jit(do_not_specialize=INTEGERS)
def prefill_count(
    query,
    key_cache,
    key_scale,
    block_table,
    query_start,
    context_lens,
    head_params,
    alibi_slopes,
    sums,
    tiles,
    tokens,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    parts,
    stage,
    parameters,
    window,
    causal,
    scale,
    softcap,
    alpha,
    MOST_PARTS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Compute entmax's next threshold and its sums over a part. Grid: tiles, KV heads, parts, or one for all parts.

    `stage` is the number of this launch, 1 or more. The sums of launch 0 and of the launch before are read, and those
    of this launch written. A program for all parts goes on until its tile has settled.
    """
    tile = tile_of_program(query_start, sequences, q_heads // kv_heads, OPTIONS)
    sequence, _, count, first = tile
    if (count <= most_tokens) | (first >= count * (q_heads // kv_heads)):
        return
    lengths, of_heads = (context_lens, block_table), (alibi_slopes, alibi_slopes, 0)
    rows, exists, heads, row = rows_of_tile(
        tile, lengths, of_heads, q_heads, kv_heads, max_blocks, window, causal, OPTIONS
    )
    alone = tl.num_programs(2) < parts
    first_part = tl.program_id(2)
    last_part = tl.where(alone, parts, first_part + 1)
    observed = sums_of_launch(sums, 0, tokens * q_heads, parts)
    counted = sums_of_launch(sums, stage - 1, tokens * q_heads, parts)
    found = sums_of_launch(sums, stage, tokens * q_heads, parts) + (rows * parts + first_part) * 8
    factor = logit_factor(scale, OPTIONS)
    peak, visible, tau = entmax_observed(
        observed, rows, exists, parts, factor * (alpha - 1.0), alpha, MOST_PARTS, OPTIONS
    )
    sink_s = entmax_sink(sink_of(head_params, heads, exists, parameters, OPTIONS), peak * factor, alpha)
    low, high, top = entmax_bracket(visible, sink_s, alpha)
    tau = tl.where(tau > low, tl.minimum(tau, high), low)  # a NaN becomes `low`, too
    sees = exists & (visible > 0)
    unsettled = stage == 1
    if stage > 1:
        before = counted + rows * parts * 8
        tau = tl.load(before + 3, mask=exists, other=0.0)
        unsettled = tl.max(tl.load(before + 7, mask=exists, other=0.0), 0) == 0
        if unsettled:
            low = tl.load(before + 4, mask=exists, other=0.0)
            high = tl.load(before + 5, mask=exists, other=0.0)
            of_keys = entmax_counted(counted, rows, exists, parts, MOST_PARTS)
            tau, low, high, unsettled = entmax_next(tau, low, high, top, of_keys, sink_s, sees, alpha, OPTIONS)
    loaded = load_query(query, rows, exists, OPTIONS)
    source = (loaded, row, (key_cache, key_cache, key_scale, key_scale), (scale, softcap, alpha))
    blocks = (block_table, sequence, max_blocks, slots, kv_heads)
    total, slope, support = tau * 0.0, tau * 0.0, tau * 0.0
    step = tl.where(unsettled, 0, MOST_STEPS)
    while step < MOST_STEPS:
        of_keys = count_parts(source, blocks, tiles, peak, tau, first_part, last_part, parts, OPTIONS)
        total, slope, support = of_keys
        step += 1
        if alone:
            tau, low, high, more = entmax_next(tau, low, high, top, of_keys, sink_s, sees, alpha, OPTIONS)
            step = tl.where(more, step, MOST_STEPS)
        else:
            step = MOST_STEPS
    pending = unsettled & (tl.num_programs(2) == parts)
    tl.store(found + 3, tau, mask=exists)
    tl.store(found + 7, tl.where(exists, tl.where(pending, 0.0, 1.0), 1.0), mask=exists)
    if pending:
        tl.store(found + 1, total, mask=exists)
        tl.store(found + 2, slope, mask=exists)
        tl.store(found + 4, low, mask=exists)
        tl.store(found + 5, high, mask=exists)
        tl.store(found + 6, support, mask=exists)


@triton.jit
def settle_part(
    bounds,
    source,
    stored,
    solution,
    of_sink,
    observed,
    sums,
    outputs,
    index,
    exists,
    OPTIONS: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Weigh a part's values, and store the sums and the output at the rows `index`.

    `stored` is (pointer to the part's list of tiles, its length) for entmax. `solution` is (peak, inverse temperature
    or tau), `of_sink` the weight of the sink, [rows] each. `observed` points to the sums of launch 0.

    `bounds` and `source` are as in `walk`; rows that do not `exist` store nothing.
    """
    peak, solved = solution
    VISITED: tl.constexpr = "listed" if OPTIONS.normalizer == "entmax" else "all"
    state = walk(bounds, source, solution, stored, OPTIONS, "settled", VISITED, STATISTICS)
    _, total, weighted_log, _, _, _, support, output, _ = state
    place, before = sums + index * 8, observed + index * 8
    tl.store(place, total * 0.0, mask=exists)  # all parts have the same peak
    tl.store(place + 1, total, mask=exists)
    tl.store(place + 2, weighted_log, mask=exists)
    tl.store(place + 5, tl.load(before + 5, mask=exists, other=0.0), mask=exists)
    tl.store(place + 7, of_sink, mask=exists)
    if STATISTICS:
        factor = logit_factor(source[3][0], OPTIONS)
        tl.store(place + 3, peak * factor, mask=exists)
        tl.store(place + 4, tl.load(before + 4, mask=exists, other=0.0) * factor, mask=exists)
        tl.store(place + 6, support if OPTIONS.normalizer == "entmax" else solved, mask=exists)
    store_output(outputs, index, exists, output, OPTIONS)


@triton.jit(do_not_specialize=INTEGERS)
def prefill_settled(
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
    sums,
    outputs,
    tiles,
    tokens,
    sequences,
    q_heads,
    kv_heads,
    max_blocks,
    slots,
    most_tokens,
    parts,
    stage,
    parameters,
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
    MOST_PARTS: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Compute the weights of a part's keys, and weigh their values. Grid: tiles, KV heads, parts.

    `sums` of earlier launches are read; those of this launch, number `stage`, and `outputs` [tokens * q_heads, parts,
    value_dim] are written for `merge_prompts`.
    """
    tile = tile_of_program(query_start, sequences, q_heads // kv_heads, OPTIONS)
    sequence, _, count, first = tile
    if (count <= most_tokens) | (first >= count * (q_heads // kv_heads)):
        return
    lengths, of_heads = (context_lens, block_table), (alibi_slopes, alibi_slopes, 0)
    rows, exists, heads, row = rows_of_tile(
        tile, lengths, of_heads, q_heads, kv_heads, max_blocks, window, causal, OPTIONS
    )
    part = tl.program_id(2)
    caches = (key_cache, value_cache, key_scale, value_scale)
    bounds, row, cache, _ = part_of_tile(
        row, caches, block_table, sequence, max_blocks, slots, kv_heads, part, parts, OPTIONS, True
    )
    loaded = load_query(query, rows, exists, OPTIONS)
    source = (loaded, row, cache, (scale, softcap, alpha))
    sink = sink_of(head_params, heads, exists, parameters, OPTIONS)
    observed = sums_of_launch(sums, 0, tokens * q_heads, parts)
    polynomial = (entropy_threshold, t0, t1, t2, t3, t4, t5, t6, t7)
    factor, stored = logit_factor(scale, OPTIONS), (0.0, 0.0)
    if OPTIONS.normalizer == "entmax":
        counted = sums_of_launch(sums, stage - 1, tokens * q_heads, parts)
        peak, solved, of_sink = entmax_solution(
            observed, counted, rows, exists, parts, sink, factor, alpha, MOST_PARTS, OPTIONS
        )
        listed = list_of_part(tiles, bounds[1], max_blocks, part, parts, OPTIONS)
        stored = (listed + 1, tl.load(listed))
    else:
        peak, solved, of_sink = adaptive_solution(
            observed, rows, exists, parts, sink, factor, polynomial, MOST_PARTS, OPTIONS
        )
    own = sums_of_launch(sums, stage, tokens * q_heads, parts)
    solution, index = (peak, solved), rows * parts + part
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            settle_part(bounds, source, stored, solution, of_sink, observed, own, outputs, index, exists, OPTIONS, True)
    else:
        settle_part(bounds, source, stored, solution, of_sink, observed, own, outputs, index, exists, OPTIONS, False)
