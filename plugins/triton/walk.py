"""The walk over a tile's keys, shared by decode and prefill: logits tile by tile, and what a pass does with them.

A walk's mode is one of
    "stream"   weights from one pass over the logits, and their values (softmax, ssa, sigmoid, relu, relu2)
    "fixed"    as "stream", but weights are not kept in range by the running maximum
    "observe"  what the solution of a row is found from: running sums (adaptive softmax) or the maximum (entmax)
    "aim"      entmax: the maximum, in `support` how far below it tau about is, and estimates of "count"'s F and G
    "count"    entmax: F and G of a threshold, in the state's `total` and `weighted_log`
    "settled"  weights from a row's solution, and their values

The parameters come in tuples:
    row         position, begin, end, slope, b, n; each [rows]: the row sees the keys begin <= key < end
    cache       key_cache, value_cache, key_scale, value_scale, table (pointer to the sequence's row; of contiguous keys
                the place of its head's first), end (keys from there on are not read), kv_head, kv_heads
    attributes  scale, softcap, alpha
    solution    peak, inverse temperature or tau; each [rows]
    stored      pointers [rows] to the logits of key 0 in scratch memory, and whether the rows exist
"""

import triton
import triton.language as tl

from sharp.plugins.triton.normalizers import (
    add_values,
    entmax_aim,
    entmax_excess,
    entmax_sums,
    settled,
    stream,
)


@triton.jit
def load_query(query, rows, exists, OPTIONS: tl.constexpr):
    """Query rows [rows, head_width], by their number (int64); zeros where a row does not exist."""
    channels = tl.arange(0, OPTIONS.head_width)
    offsets = rows * OPTIONS.head_dim
    inside = exists[:, None]
    if OPTIONS.head_width != OPTIONS.head_dim:
        inside = inside & (channels < OPTIONS.head_dim)[None, :]
    return tl.load(query + offsets[:, None] + channels[None, :], mask=inside, other=0.0)


@triton.jit
def row_numbers(first, count, token, heads, q_heads, OPTIONS: tl.constexpr):
    """Where rows stand among queries, outputs and statistics (int64); `token` counts from the sequence's `first`."""
    if OPTIONS.contiguous:  # [sequences, q_heads, tokens of a sequence]
        rows = first.to(tl.int64) * q_heads + heads * count + token
    else:  # [tokens, q_heads]
        rows = (first + token).to(tl.int64) * q_heads + heads
    return rows


@triton.jit
def keys_of(block_table, sequence, context, count, max_blocks, OPTIONS: tl.constexpr):
    """How many keys a sequence has, with those of its `count` tokens in this step."""
    if OPTIONS.contiguous:
        keys = tl.load(block_table + sequence)
    else:
        keys = tl.minimum(context + count, max_blocks * OPTIONS.block_size)
    return keys


@triton.jit
def head_values(head_params, alibi_slopes, heads, exists, parameters, OPTIONS: tl.constexpr):
    """Slope, b and n of the rows' heads; zeros where they are not used."""
    slope = tl.full([OPTIONS.rows], 0, tl.float32)
    b, n = slope, slope
    if OPTIONS.alibi:
        slope = tl.load(alibi_slopes + heads, mask=exists, other=0.0)
    if OPTIONS.normalizer == "ssa":
        b = tl.load(head_params + heads * parameters, mask=exists, other=0.0)
        n = tl.load(head_params + heads * parameters + 1, mask=exists, other=0.0)
    return slope, b, n


@triton.jit
def blocks_of(keys, OPTIONS: tl.constexpr):
    """Number of cache blocks that hold the first `keys` keys of a sequence."""
    return (keys + OPTIONS.block_size - 1) // OPTIONS.block_size


@triton.jit
def cache_of(tensors, block_table, sequence, max_blocks, places, end, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """A walk's `cache`; `tensors` are the first four of it."""
    key_cache, value_cache, key_scale, value_scale = tensors
    if OPTIONS.contiguous:
        table = (sequence.to(tl.int64) * kv_heads + kv_head) * places
    else:
        table = block_table + sequence.to(tl.int64) * max_blocks
    return key_cache, value_cache, key_scale, value_scale, table, end, kv_head, kv_heads


@triton.jit
def load_pages(start, cache, OPTIONS: tl.constexpr):
    """Block of every key of the tile at `start`, -1 for none; by whole blocks, so that loads of keys stay vectors.

    A block is looked up once and not once for each of its keys: in prefill the registers that this takes made the
    assembler wait for every single matrix product. Contiguous keys are all of block 0, as far as there are any.
    """
    _, _, _, _, table, end, _, _ = cache
    if OPTIONS.contiguous:
        page = tl.where(start + tl.arange(0, OPTIONS.keys) < end, 0, -1)
    else:
        BLOCKS: tl.constexpr = OPTIONS.blocks
        KEYS: tl.constexpr = OPTIONS.keys // OPTIONS.blocks  # of a block, in this tile
        index = start // OPTIONS.block_size + tl.arange(0, BLOCKS)
        page = tl.load(table + index, mask=index < blocks_of(end, OPTIONS), other=-1)
        page = tl.broadcast_to(page[:, None], [BLOCKS, KEYS])
        page = tl.max_constancy(tl.reshape(page, [OPTIONS.keys]), KEYS)
    return page


@triton.jit
def load_keys(start, page, cache, OPTIONS: tl.constexpr):
    """Keys [head_width, keys]: a block's panel is [head_dim, block_size], contiguous keys are [keys, head_dim]."""
    key_cache, _, key_scale, _, table, _, kv_head, kv_heads = cache
    channels = tl.arange(0, OPTIONS.head_width)
    index = tl.arange(0, OPTIONS.keys)
    inside = (page >= 0)[None, :]
    if OPTIONS.head_width != OPTIONS.head_dim:
        inside = inside & (channels < OPTIONS.head_dim)[:, None]
    if OPTIONS.contiguous:
        tile = key_cache + (table + start) * OPTIONS.head_dim
        pointers = tile + index[None, :] * OPTIONS.head_dim + channels[:, None]
    else:
        panel = (page.to(tl.int64) * kv_heads + kv_head) * (OPTIONS.head_dim * OPTIONS.block_size)
        offsets = panel + (start + index) % OPTIONS.block_size
        pointers = key_cache + offsets[None, :] + channels[:, None] * OPTIONS.block_size
    loaded = tl.load(pointers, mask=inside, other=0.0).to(OPTIONS.element)
    if OPTIONS.quantized:
        loaded = loaded * block_scale(key_scale, page, cache)[None, :]
    return loaded


@triton.jit
def load_values(start, used, page, cache, OPTIONS: tl.constexpr):
    """Values [keys, value_width] of the keys that are `used`; what no row sees is not read, as it may be NaN."""
    _, value_cache, _, value_scale, table, _, kv_head, kv_heads = cache
    channels = tl.arange(0, OPTIONS.value_width)
    index = tl.arange(0, OPTIONS.keys)
    inside = used[:, None]
    if OPTIONS.value_width != OPTIONS.value_dim:
        inside = inside & (channels < OPTIONS.value_dim)[None, :]
    if OPTIONS.contiguous:
        tile = value_cache + (table + start) * OPTIONS.value_dim
        pointers = tile + index[:, None] * OPTIONS.value_dim + channels[None, :]
    else:
        panel = (page.to(tl.int64) * kv_heads + kv_head) * OPTIONS.block_size
        offsets = (panel + (start + index) % OPTIONS.block_size) * OPTIONS.value_dim
        pointers = value_cache + offsets[:, None] + channels[None, :]
    loaded = tl.load(pointers, mask=inside, other=0.0).to(OPTIONS.element)
    if OPTIONS.quantized:
        loaded = loaded * tl.where(used, block_scale(value_scale, page, cache), 0.0)[:, None]
    return loaded


@triton.jit
def block_scale(scale, page, cache):
    """What the integers of every key's block are multiplied by, float32 [keys]; 0 where there is no block."""
    _, _, _, _, _, _, kv_head, kv_heads = cache
    return tl.load(scale + page.to(tl.int64) * kv_heads + kv_head, mask=page >= 0, other=0.0)


@triton.jit
def tanh(x):
    """From e^-2|x|, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def tile_logits(query, start, page, row, cache, attributes, OPTIONS: tl.constexpr):
    """Logits [rows, keys] in the kernels' unit, before the mask: scale, soft cap, position bias."""
    position, _, _, slope, _, _ = row
    scale, softcap, _ = attributes
    dots = tl.dot(query, load_keys(start, page, cache, OPTIONS), input_precision=OPTIONS.precision)
    if OPTIONS.softcap:
        logits = softcap * OPTIONS.unit * tanh(dots * (scale / softcap))
    else:
        logits = dots * (scale * OPTIONS.unit)
    if OPTIONS.alibi:
        keys = start + tl.arange(0, OPTIONS.keys)
        distance = tl.abs(keys[None, :] - position[:, None]).to(tl.float32)
        logits = logits - (slope * OPTIONS.unit)[:, None] * distance
    return logits


@triton.jit
def visit(
    start,
    state,
    query,
    row,
    cache,
    attributes,
    solution,
    stored,
    OPTIONS: tl.constexpr,
    MODE: tl.constexpr,
    STORE: tl.constexpr,
    MASKED: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """What a tile of keys adds to the state. Only a tile that is MASKED may hold keys that some row does not see."""
    peak, total, weighted_log, highest, lowest, visible, support, output = state
    _, begin, end, _, _, _ = row
    _, _, alpha = attributes
    keys = start + tl.arange(0, OPTIONS.keys)
    page = load_pages(start, cache, OPTIONS)
    mapped = page >= 0
    logits = tile_logits(query, start, page, row, cache, attributes, OPTIONS)
    used = mapped
    if MASKED:
        sees = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None]) & mapped[None, :]
        logits = tl.where(sees, logits, -float("inf"))
        used = mapped & (keys >= tl.min(begin)) & (keys < tl.max(end))
        seen = tl.sum(sees.to(tl.float32), 1)
    else:
        # Added, not selected: the addition goes into the multiplication by the scale.
        logits = logits + tl.where(mapped, 0.0, -float("inf"))[None, :]
        seen = tl.sum(mapped.to(tl.float32), 0)
    if STORE:
        pointers, exists = stored
        inside = keys // OPTIONS.block_size < blocks_of(cache[5], OPTIONS)  # whole ones, so that reads may be vectors
        tl.store(pointers[:, None] + keys[None, :], logits, mask=exists[:, None] & inside[None, :])

    if MODE != "count" and MODE != "settled":
        visible += seen
        if STATISTICS:
            if not OPTIONS.peak_is_highest:
                highest = tl.maximum(highest, tl.max(logits, 1))
            hidden = tl.where(sees, logits, float("inf")) if MASKED else tl.where(mapped[None, :], logits, float("inf"))
            lowest = tl.minimum(lowest, tl.min(hidden, 1))
    if MODE == "stream" or MODE == "fixed":
        sums = (peak, total, weighted_log, support)
        weights, sums, factor = stream(logits, row, sums, OPTIONS, STATISTICS, MODE == "stream")
        peak, total, weighted_log, support = sums
        if MODE == "stream" and not OPTIONS.pointwise:
            output = output * factor[:, None]
        output = add_values(output, weights, load_values(start, used, page, cache, OPTIONS), OPTIONS)
    elif MODE == "observe":
        if OPTIONS.normalizer == "entmax":
            peak = tl.maximum(peak, tl.max(logits, 1))
        else:
            _, sums, _ = stream(logits, row, (peak, total, weighted_log, support), OPTIONS, True, True)
            peak, total, weighted_log, support = sums
    elif MODE == "aim":
        peak, total, weighted_log, support = entmax_aim(logits, (peak, total, weighted_log, support), alpha, OPTIONS)
    elif MODE == "count":
        excess = entmax_excess(logits, solution[0], solution[1], alpha)
        add_total, add_slope = entmax_sums(excess, alpha, OPTIONS)
        total += add_total
        weighted_log += add_slope
    else:
        weights, sums = settled(logits, solution, alpha, (total, weighted_log, support), OPTIONS, STATISTICS)
        total, weighted_log, support = sums
        if OPTIONS.normalizer == "entmax":
            # `!= 0` and not `> 0`: a NaN must reach the output.
            if tl.max((tl.sum(weights, 1) != 0).to(tl.int32)) > 0:
                values = load_values(start, used, page, cache, OPTIONS)
                output = add_values(output, weights, values, OPTIONS)
        else:
            output = add_values(output, weights, load_values(start, used, page, cache, OPTIONS), OPTIONS)
    return peak, total, weighted_log, highest, lowest, visible, support, output


@triton.jit
def walk(
    bounds,
    state,
    query,
    row,
    cache,
    attributes,
    solution,
    stored,
    OPTIONS: tl.constexpr,
    MODE: tl.constexpr,
    STORE: tl.constexpr,
    FULL: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """The state after all tiles of [low, high); those in [full_low, full_high) have every key seen by every row.

    All four bounds but `high` are multiples of the tile. Without FULL there are no full tiles.
    """
    low, full_low, full_high, high = bounds
    left = (full_low - low) // OPTIONS.keys
    masked = left + (high - full_high + OPTIONS.keys - 1) // OPTIONS.keys
    for tile in tl.range(0, masked):
        skipped = tl.where(tile >= left, full_high - full_low, 0) // OPTIONS.keys
        start = (low // OPTIONS.keys + tile + skipped) * OPTIONS.keys
        state = visit(
            start, state, query, row, cache, attributes, solution, stored, OPTIONS, MODE, STORE, True, STATISTICS
        )
    if FULL:
        for tile in tl.range(full_low // OPTIONS.keys, full_high // OPTIONS.keys):
            start = tile * OPTIONS.keys
            state = visit(
                start, state, query, row, cache, attributes, solution, stored, OPTIONS, MODE, STORE, False, STATISTICS
            )
    return state
