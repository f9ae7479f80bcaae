"""Prompts whose keys are split over programs, under adaptive softmax: a launch for every pass over the keys.

What a key's weight is only the logits of all parts tell, and a launch is the one thing that waits for all programs. The
launches are numbered:
    prefill_observe   0: a part's running sums
    prefill_settled   1: the temperatures, from the sums of all parts, and then the weights and values of a part;
                      `merge.py` puts the parts together
Every program of a tile computes the same temperatures from the same numbers.

Scratch memory, float32, for all rows [tokens * query heads]:
    sums     [2 sets, rows, parts, 8]: every launch has its set. A part's numbers:
                 observe   peak, total, weighted_log, lowest in 4, visible in 5; of logits without their `logit_factor`
                 settled   those of `decode.py`, with the peak 0, in 6 the inverse temperature, and in 7 the weight of
                           the sink
    outputs  [rows, parts, value_dim]
"""

import triton
import triton.language as tl

from sharp.plugins.triton.decode import collects, store_output
from sharp.plugins.triton.loads import load_query, sink_of, visible_keys
from sharp.plugins.triton.normalizers import logit_factor, sink_weight, temperature
from sharp.plugins.triton.prefill import part_of_tile, rows_of_tile, tile_of_program
from sharp.plugins.triton.rows import sums_of_launch
from sharp.plugins.triton.solve import merged_sums
from sharp.plugins.triton.walk import walk

INTEGERS = (
    *("tokens", "sequences", "q_heads", "kv_heads", "max_blocks", "slots", "most_tokens", "parts", "stage"),
    *("parameters", "window", "causal"),
)


@triton.jit
def sums_of_rows(sums, rows, exists, parts, MOST_PARTS: tl.constexpr):
    """Pointers [parts, rows] to the first of each part's numbers, and whether there are any."""
    part = tl.arange(0, MOST_PARTS)[:, None]
    return sums + (rows[None, :] * parts + part) * 8, (part < parts) & exists[None, :]


@triton.jit
def observe_part(bounds, source, sums, exists, visible, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr):
    """Walk a part's keys, and store what comes of it at the rows `sums`."""
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
    """What the weights of all parts are found from. Grid as `prefill`."""
    tile = tile_of_program(query_start, sequences, q_heads // kv_heads, OPTIONS)
    sequence, _, count, first = tile
    if (count <= most_tokens) | (first >= count * (q_heads // kv_heads)):
        return
    rows, exists, _, row = rows_of_tile(
        tile,
        context_lens,
        block_table,
        alibi_slopes,
        alibi_slopes,
        q_heads,
        kv_heads,
        max_blocks,
        0,
        window,
        causal,
        OPTIONS,
    )
    part = tl.program_id(2)
    caches = (key_cache, key_cache, key_scale, key_scale)
    bounds, row, cache, mapped = part_of_tile(
        row, caches, block_table, sequence, max_blocks, slots, kv_heads, part, parts, OPTIONS, True
    )
    loaded = load_query(query, rows, exists, OPTIONS)
    visible = visible_keys(bounds[0], bounds[3], mapped, row, cache, OPTIONS)
    source = (loaded, row, cache, (scale, softcap, alpha))
    own = sums_of_launch(sums, stage, tokens * q_heads, parts) + (rows * parts + part) * 8
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            observe_part(bounds, source, own, exists, visible, OPTIONS, True)
    else:
        observe_part(bounds, source, own, exists, visible, OPTIONS, False)


@triton.jit
def adaptive_solution(
    observed, rows, exists, parts, sink, factor, polynomial, MOST_PARTS: tl.constexpr, OPTIONS: tl.constexpr
):
    """The rows' peaks, inverse temperatures and weights of sinks, from what all parts have observed."""
    place, used = sums_of_rows(observed, rows, exists, parts, MOST_PARTS)
    peaks = tl.load(place, mask=used, other=-float("inf"))
    totals = tl.load(place + 1, mask=used, other=0.0)
    weighted_logs = tl.load(place + 2, mask=used, other=0.0)
    peak = tl.max(peaks, 0)
    total, weighted_log = merged_sums(peaks * factor, (peak * factor)[None, :], totals, weighted_logs)
    threshold, t0, t1, t2, t3, t4, t5, t6, t7 = polynomial
    beta = temperature(total, weighted_log, threshold, t0, t1, t2, t3, t4, t5, t6, t7)
    return peak, beta, sink_weight(sink, peak * factor * beta, beta, beta, OPTIONS)


@triton.jit
def settle_part(
    bounds,
    source,
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
    """Weigh a part's values, and store what comes of it at the rows `index`."""
    peak, solved = solution
    unused = (0.0, 0.0)
    state = walk(bounds, source, solution, unused, OPTIONS, "settled", "all", STATISTICS)
    _, total, weighted_log, _, _, _, _, output, _ = state
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
        tl.store(place + 6, solved, mask=exists)
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
    """The weights of a part's keys, and their values. Grid as `prefill`."""
    tile = tile_of_program(query_start, sequences, q_heads // kv_heads, OPTIONS)
    sequence, _, count, first = tile
    if (count <= most_tokens) | (first >= count * (q_heads // kv_heads)):
        return
    rows, exists, heads, row = rows_of_tile(
        tile,
        context_lens,
        block_table,
        alibi_slopes,
        alibi_slopes,
        q_heads,
        kv_heads,
        max_blocks,
        0,
        window,
        causal,
        OPTIONS,
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
    peak, solved, of_sink = adaptive_solution(
        observed, rows, exists, parts, sink, logit_factor(scale, OPTIONS), polynomial, MOST_PARTS, OPTIONS
    )
    own = sums_of_launch(sums, stage, tokens * q_heads, parts)
    solution, index = (peak, solved), rows * parts + part
    if collects(collect_stats, OPTIONS):
        if OPTIONS.statistics:
            settle_part(bounds, source, solution, of_sink, observed, own, outputs, index, exists, OPTIONS, True)
    else:
        settle_part(bounds, source, solution, of_sink, observed, own, outputs, index, exists, OPTIONS, False)
