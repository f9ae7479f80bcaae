"""The walk over a tile's keys, shared by decode and prefill: it computes logits tile by tile and updates the state.

A walk's mode is one of
    "stream"   weights from one pass over the logits, and their values (softmax, ssa, softpick, sigmoid, relu, relu2)
    "fixed"    as "stream", but weights are not kept in range by the running maximum
    "observe"  the numbers that a row's solution is found from: running sums (adaptive softmax) or the maximum (entmax)
    "aim"      entmax: the maximum, in `visible` an estimate of the distance of tau below it, and estimated "count" sums
    "count"    entmax: a threshold's sums (`entmax_sums`), in the state's `total`, `weighted_log` and `support`
    "settled"  weights from a row's solution, and their values

The parameters come in tuples:
    source      query (its parts), row, cache, attributes
    row         position, begin, end, slope, b, n; each [rows]: the row sees the keys begin <= key < end
    cache       key_cache, value_cache, key_scale, value_scale, table (pointer to the sequence's row; for contiguous
                keys the place of the head's first key), begin, end (no row sees keys outside: their values, and keys
                from the end on, are not read), kv_head, kv_heads, slots (of the whole cache; blocks behind do not
                exist)
    attributes  scale, softcap, alpha
    solution    peak, inverse temperature or tau; each [rows]
    stored      pointers [rows] to the logits of key 0 in scratch memory, and whether the rows exist; for a walk over
                listed tiles the pointer to the list in scratch memory, and its length
"""

import triton
import triton.language as tl

from sharp.plugins.triton.entmax import entmax_aim, entmax_excess, entmax_sums
from sharp.plugins.triton.loads import blocks_of, load_keys, load_pages, load_values
from sharp.plugins.triton.normalizers import add_values, empty_state, logit_factor, settled, stream, widened

CHUNK = tl.constexpr(256)


@triton.jit
def tanh(x):
    """Return tanh x, computed from e^-2|x|, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def tile_logits(query, start, page, row, cache, attributes, OPTIONS: tl.constexpr, MAPPED: tl.constexpr):
    """Return logits [rows, keys] of the tile at `start` before the mask: products, scale, soft cap, position bias.

    If `OPTIONS.scaled_late` they are the products alone, and the caller multiplies them by their `logit_factor`. `page`
    is that of `load_pages`, `query` the tuple of `load_query`, `attributes` (scale, softcap, alpha).
    """
    position, _, _, slope, _, _ = row
    scale, softcap, _ = attributes
    keys, scales = load_keys(start, page, cache, OPTIONS, MAPPED)
    logits = tl.dot(query[0], keys, input_precision=OPTIONS.precision)
    PARTS: tl.constexpr = OPTIONS.query_parts
    for part in tl.static_range(1, PARTS):
        logits = tl.dot(query[part], keys, logits)
    if OPTIONS.quantized:
        logits = logits * scales[None, :]
    if OPTIONS.softcap:
        logits = softcap * OPTIONS.unit * tanh(logits * (scale / softcap))
    elif not OPTIONS.scaled_late:
        logits = logits * (scale * OPTIONS.unit)
    if OPTIONS.alibi:
        keys = start + tl.arange(0, OPTIONS.keys)
        distance = tl.abs(keys[None, :] - position[:, None]).to(tl.float32)
        logits = logits - (slope * OPTIONS.unit)[:, None] * distance
    return logits


@triton.jit
def visit(
    start,
    state,
    source,
    solution,
    stored,
    OPTIONS: tl.constexpr,
    MODE: tl.constexpr,
    STORE: tl.constexpr,
    MASKED: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Return the state updated by a tile of keys, and in the mode "aim" which rows may give its keys a weight.

    `start` is the tile's first key; the other arguments are those of `walk`. Only a MASKED tile may hold keys that some
    row does not see, or that have no block. STORE keeps the logits in `stored`. In modes but "aim" the second result is
    False.
    """
    peak, total, weighted_log, highest, lowest, visible, support, output, opposed = state
    query, row, cache, attributes = source
    _, begin, end, _, _, _ = row
    scale, _, alpha = attributes
    factor = logit_factor(scale, OPTIONS)
    keys = start + tl.arange(0, OPTIONS.keys)
    page = load_pages(start, cache, OPTIONS, not MASKED)
    logits = tile_logits(query, start, page, row, cache, attributes, OPTIONS, not MASKED)
    used = keys >= 0
    if MASKED:
        used = (page >= 0) & (keys >= cache[5]) & (keys < cache[6])
        key = tl.where(page >= 0, keys, -1)[None, :]
        sees = (key >= begin[:, None]) & (key < end[:, None])
        logits = tl.where(sees, logits, -float("inf"))
        if OPTIONS.spread:
            visible += sees.to(tl.float32)
    if STORE:
        pointers, exists = stored
        written = exists[:, None]
        if MASKED:
            inside = keys // OPTIONS.block_size < blocks_of(cache[6], OPTIONS)  # whole blocks, so reads may be vectors
            written = written & inside[None, :]
        tl.store(pointers[:, None] + keys[None, :], logits * factor, mask=written)

    live = False
    if STATISTICS and MODE != "count" and MODE != "settled":
        shown = tl.where(sees, logits, float("inf")) if MASKED else logits
        if not OPTIONS.peak_is_highest:
            highest = tl.maximum(highest, logits if OPTIONS.spread else tl.max(logits, 1))
        lowest = tl.minimum(lowest, shown if OPTIONS.spread else tl.min(shown, 1))
    if MODE == "stream" or MODE == "fixed":
        sums = (peak, total, weighted_log, support, opposed)
        weights, sums, shrunk = stream(logits, row, factor, sums, OPTIONS, STATISTICS, MODE == "stream", False)
        peak, total, weighted_log, support, opposed = sums
        if MODE == "stream" and not OPTIONS.pointwise:
            output = output * widened(shrunk, not OPTIONS.spread)
        values, scales = load_values(start, used, page, cache, OPTIONS, not MASKED)
        output = add_values(output, weights, values, scales, OPTIONS)
    elif MODE == "observe":
        if OPTIONS.normalizer == "entmax":
            peak = tl.maximum(peak, logits if OPTIONS.spread else tl.max(logits, 1))
        else:
            sums = (peak, total, weighted_log, support, opposed)
            _, sums, _ = stream(logits, row, factor, sums, OPTIONS, True, True, OPTIONS.spread)
            peak, total, weighted_log, support, opposed = sums
    elif MODE == "aim":
        aimed, live = entmax_aim(logits, factor, (peak, visible, total, weighted_log, support), alpha, OPTIONS)
        peak, visible, total, weighted_log, support = aimed
    elif MODE == "count":
        excess = entmax_excess(logits, solution[0], solution[1], factor * (alpha - 1.0))
        add_total, add_slope, add_support = entmax_sums(excess, alpha, OPTIONS)
        total += add_total
        weighted_log += add_slope
        support += add_support
    else:
        weights, sums = settled(logits, solution, factor, alpha, (total, weighted_log, support), OPTIONS, STATISTICS)
        total, weighted_log, support = sums
        values, scales = load_values(start, used, page, cache, OPTIONS, not MASKED)
        output = add_values(output, weights, values, scales, OPTIONS)
    return (peak, total, weighted_log, highest, lowest, visible, support, output, opposed), live


@triton.jit
def walk(
    bounds,
    source,
    solution,
    stored,
    OPTIONS: tl.constexpr,
    MODE: tl.constexpr,
    FULL: tl.constexpr,
    STATISTICS: tl.constexpr,
    STORE: tl.constexpr = False,
    SEEDED: tl.constexpr = False,
):
    """Return the state of rows after the tiles of [low, high); `bounds` is (low, full_low, full_high, high).

    The state is (peak, total, weighted_log, highest, lowest, visible, support, output, opposed). MODE is "stream" or
    "fixed" (weights and values in one pass), "observe" or "aim" (what the solution is found from), "count" (a
    threshold's sums), or "settled" (weights and values from the solution). `source` is (query parts, row, cache,
    (scale, softcap, alpha)), `row` (position, begin, end, slope, b, n), `solution` (peak, inverse temperature or tau),
    `stored` (pointers [rows] to the logits of key 0, whether rows exist), or (pointer to a list of tiles, its length).

    In [full_low, full_high) every row sees every key, and all keys have a block. All four bounds except `high` are
    multiples of the tile; if full tiles are listed, full_low and full_high are multiples of `listed_keys`. FULL selects
    the full tiles that are visited: "all", those "listed" in `stored`, or "none". STORE keeps the logits in `stored`.
    SEEDED, in the mode "aim", starts with the peak of the solution.
    """
    state = empty_state(OPTIONS, STORE)
    if SEEDED:
        none = state[1]
        state = (solution[0], none, none, state[3], state[4], none + float("inf"), none, state[7], none)
    low, full_low, full_high, high = bounds
    left = (full_low - low) // OPTIONS.keys
    masked = left + (high - full_high + OPTIONS.keys - 1) // OPTIONS.keys
    for tile in tl.range(0, masked):
        skipped = tl.where(tile >= left, full_high - full_low, 0) // OPTIONS.keys
        start = (low // OPTIONS.keys + tile + skipped) * OPTIONS.keys
        state, _ = visit(start, state, source, solution, stored, OPTIONS, MODE, STORE, True, STATISTICS)
    if FULL == "all":
        for tile in tl.range(full_low // OPTIONS.keys, full_high // OPTIONS.keys):
            start = tile * OPTIONS.keys
            state, _ = visit(start, state, source, solution, stored, OPTIONS, MODE, STORE, False, STATISTICS)
    if FULL == "listed":
        listed, count = stored
        EACH: tl.constexpr = OPTIONS.listed_keys // OPTIONS.keys  # tiles per entry of the list
        entry = tl.load(listed)
        for index in tl.range(0, count * EACH):
            start = entry * OPTIONS.listed_keys + index % EACH * OPTIONS.keys
            entry = tl.load(listed + (index + 1) // EACH)  # the list has a spare entry at its end
            state, _ = visit(start, state, source, solution, stored, OPTIONS, MODE, False, False, STATISTICS)
    return state


@triton.jit
def aim(bounds, source, listed, exists, seed, OPTIONS: tl.constexpr, STATISTICS: tl.constexpr, SEEDED: tl.constexpr):
    """Walk all tiles in the mode "aim" and list the full ones that may get a weight; return state and list length.

    `listed` points to int32 scratch memory, which gets the numbers of the tiles of `listed_keys` keys, with room for
    all of them and one more. SEEDED: the walk starts with the peak `seed`, the maximum of some keys of the rows.
    """
    unused = (0.0, 0.0)
    state = walk(bounds, source, (seed, 0.0), unused, OPTIONS, "aim", "none", STATISTICS, False, SEEDED)
    _, full_low, full_high, _ = bounds
    first = full_low // OPTIONS.listed_keys
    count = full_high // OPTIONS.listed_keys - first
    clear(listed, count)
    flags = listed - first + tl.zeros_like(source[1][0])
    for tile in tl.range(full_low // OPTIONS.keys, full_high // OPTIONS.keys):
        start = tile * OPTIONS.keys
        state, live = visit(start, state, source, unused, unused, OPTIONS, "aim", False, False, STATISTICS)
        # Each row stores its own flag, so warps need not wait for each other.
        tl.store(flags + start // OPTIONS.listed_keys, 1, mask=live & exists)
    return state, compact(listed, first, count)


@triton.jit
def clear(listed, count):
    """Write zeros into the first `count` places of `listed`, and wait for all threads."""
    for start in tl.range(0, count, CHUNK):
        places = start + tl.arange(0, CHUNK)
        tl.store(listed + places, 0, mask=places < count)
    tl.debug_barrier()


@triton.jit
def compact(listed, first, count):
    """Write the numbers of the places of `listed` that are 1, not 0, to its front in order, and return their count.

    There are `count` places; the first has the number `first`.
    """
    tl.debug_barrier()
    kept = count * 0
    for start in tl.range(0, count, CHUNK):
        places = start + tl.arange(0, CHUNK)
        keep = tl.load(listed + places, mask=places < count, other=0)
        tl.debug_barrier()  # all threads must read before one writes, because entries move to the front
        tl.store(listed + kept + tl.cumsum(keep, 0) - keep, first + places, mask=keep != 0)
        kept += tl.sum(keep, 0)
    tl.debug_barrier()
    return kept
