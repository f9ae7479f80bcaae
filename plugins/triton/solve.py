"""The solution between decoding's passes with adaptive softmax and entmax: a temperature or threshold for each row."""

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
from sharp.plugins.triton.loads import sink_of
from sharp.plugins.triton.normalizers import sink_weight, temperature
from sharp.plugins.triton.plan import splits_of
from sharp.plugins.triton.rows import scratch_row, split_row, unit_of

INTEGERS = ("sequences", "q_heads", "max_blocks", "most_tokens", "window", "causal", "parameters")
MOST_STEPS = tl.constexpr(64)


@triton.jit
def stored_entmax_sums(logits, first, end, peak, threshold, alpha, CHUNK: tl.constexpr, OPTIONS: tl.constexpr):
    """Return the sums (`entmax_sums`), [1] each, of one row's `threshold` [1] over its logits in scratch memory.

    `logits` points to the logit of key 0; the keys [first, end) are read, CHUNK at a time.
    """
    total = tl.full([1], 0, tl.float32)
    slope = tl.full([1], 0, tl.float32)
    support = tl.full([1], 0, tl.float32)
    written = (end + 15) // 16 * 16  # rounded up, so that loads are vectors; blocks and tiles hold at least 16 keys
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
    plan,
    sums,
    logits,
    solution,
    sequences,
    q_heads,
    max_blocks,
    most_tokens,
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
    """Solve one row: inverse temperature, or entmax's tau. Grid: units * their most tokens, query heads.

    `sums` and `logits` are those of `decode_observe`. `solution` float32 [rows, 3] gets the row's peak, its inverse
    temperature or tau, and the weight of the sink relative to those of the keys.
    """
    index = tl.program_id(0) // tl.maximum(most_tokens, 1)
    unit = unit_of(query_start, sequences, most_tokens, index)
    token = tl.program_id(0) % tl.maximum(most_tokens, 1)
    if token >= unit[2]:
        return
    item, active, begin, end = splits_of(
        plan, index, unit, context_lens, block_table, max_blocks, window, causal, OPTIONS
    )
    row = scratch_row(unit, token, most_tokens, q_heads, tl.program_id(1))
    split = tl.arange(0, MOST_SPLITS)
    place = sums + split_row(item + split, token, most_tokens, q_heads, tl.program_id(1)) * 8
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
    """Return totals and weighted_logs of splits, brought to one peak and added over axis 0; NaN sums stay NaN.

    Peaks are base-2 exponents; `peak` is their maximum over the splits, broadcastable to `peaks`.
    """
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    moved = peaks - shift
    factor = tl.exp2(moved)
    logs = tl.where(factor == 0, 0.0, factor * (weighted_logs + moved * totals))
    return tl.sum(factor * totals, 0), tl.sum(logs, 0)
