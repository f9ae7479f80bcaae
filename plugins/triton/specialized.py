"""The full tiles of prompts on sm_90, by warps with a task each, so that softmax and matrix products overlap.

One warp group copies keys and values into shared memory by tensor descriptors (TMA). Two others have 64 of the query
rows each; they wait for the copies and not for each other, so that one computes exponentials while the other's matrix
products run. Triton makes the three of one program (`warp_specialize`), if it is simple enough: no loads by pointers
from which matrix products follow, no branches, no second loop with products. So

    `prefill_full`  visits the tiles in which every row sees every key, and stores the sums of rows. Rows are tokens of
                    one head, which a descriptor loads, and a tile of keys is a block of the cache.
    `prefill`       visits all others, and adds the stored sums to its own (`add_full_tiles`).

For softmax and ssa in 16 bits; with statistics `prefill` visits all tiles.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import finite_or_zero
from sharp.plugins.triton.decode import collects
from sharp.plugins.triton.loads import cache_of, context_of, every_block_mapped, keys_of, row_numbers
from sharp.plugins.triton.normalizers import empty_state, logit_factor, stream
from sharp.plugins.triton.rows import row_bounds

INTEGERS = (
    *("tokens", "sequences", "q_heads", "kv_heads", "max_blocks", "slots", "most_tokens", "parameters"),
    *("window", "causal"),
)
SEQUENCES = tl.constexpr(256)  # that are looked at together


@triton.jit
def full_tiles(first, count, context, held, caches, place, window, causal, OPTIONS: tl.constexpr):
    """Keys [low, high) in full tiles of the sequence's tokens from `first` on, none where a block is missing.

    `place` is what a walk's `cache` is made from: block_table, sequence, max_blocks, slots, kv_head, kv_heads.
    """
    # By the first and the last row: a reduction over rows would be one over warp groups.
    _, high = row_bounds(context + first, held, window, causal)
    low, _ = row_bounds(context + tl.minimum(first + OPTIONS.rows, count) - 1, held, window, causal)
    low = tl.cdiv(low, OPTIONS.keys) * OPTIONS.keys
    high = tl.maximum(high // OPTIONS.keys * OPTIONS.keys, low)
    block_table, sequence, max_blocks, slots, kv_head, kv_heads = place
    cache = cache_of(caches, block_table, sequence, max_blocks, slots, low, high, kv_head, kv_heads, OPTIONS)
    return low, tl.where(every_block_mapped(low, high, cache, OPTIONS), high, low), cache


@triton.jit
def descriptors(query, cache, tokens, q_heads, high, OPTIONS: tl.constexpr):
    """Those of the query's rows, of keys [head_dim, keys] (contiguous ones [keys, head_dim]), and of values."""
    key_cache, value_cache, _, _, table, _, _, _, kv_heads, slots = cache
    DIM: tl.constexpr = OPTIONS.head_dim
    VALUE: tl.constexpr = OPTIONS.value_dim
    KEYS: tl.constexpr = OPTIONS.keys
    if OPTIONS.contiguous:
        queries = tl.make_tensor_descriptor(query, [tokens * q_heads, DIM], [DIM, 1], [OPTIONS.rows, DIM])
        keys = tl.make_tensor_descriptor(key_cache + table * DIM, [high, DIM], [DIM, 1], [KEYS, DIM])
        values = tl.make_tensor_descriptor(value_cache + table * VALUE, [high, VALUE], [VALUE, 1], [KEYS, VALUE])
    else:
        panels = slots // OPTIONS.block_size * kv_heads
        queries = tl.make_tensor_descriptor(query, [tokens, q_heads * DIM], [q_heads * DIM, 1], [OPTIONS.rows, DIM])
        keys = tl.make_tensor_descriptor(key_cache, [panels * DIM, KEYS], [KEYS, 1], [DIM, KEYS])
        values = tl.make_tensor_descriptor(value_cache, [panels * KEYS, VALUE], [VALUE, 1], [KEYS, VALUE])
    return queries, keys, values


@triton.jit(do_not_specialize=INTEGERS)
def prefill_full(
    query,
    key_cache,
    value_cache,
    block_table,
    query_start,
    context_lens,
    head_params,
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
    parameters,
    window,
    causal,
    scale,
    OPTIONS: tl.constexpr,
):
    """Grid: tiles, query heads; there are tokens // rows + sequences tiles.

    Of every row that has full tiles: `sums` float32 [rows, 8], peak and total; `outputs` [rows, value_dim].
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tile * 0 - 1  # the last one whose first tile is not behind this one
    for start in tl.range(0, sequences, SEQUENCES):
        index = start + tl.arange(0, SEQUENCES)
        token = tl.load(query_start + index, mask=index < sequences, other=0)
        sequence += tl.sum(((index < sequences) & (token // OPTIONS.rows + index <= tile)).to(tl.int32), 0)
    first_token = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first_token
    first = (tile - (first_token // OPTIONS.rows + sequence)) * OPTIONS.rows
    head = tl.program_id(1)
    context = context_of(context_lens, sequence, max_blocks, OPTIONS)
    held = keys_of(block_table, sequence, context, count, max_blocks, OPTIONS)
    place = (block_table, sequence, max_blocks, slots, head // (q_heads // kv_heads), kv_heads)
    caches = (key_cache, value_cache, key_cache, value_cache)
    low, high, cache = full_tiles(first, count, context, held, caches, place, window, causal, OPTIONS)
    idle = collects(collect_stats, OPTIONS) | (count <= most_tokens) | (first >= count)
    high = tl.where(idle, low, high)

    queries, keys, values = descriptors(query, cache, tokens, q_heads, high, OPTIONS)
    if OPTIONS.contiguous:
        rows = queries.load([row_numbers(first_token, count, first, head, q_heads, OPTIONS).to(tl.int32), 0])
    else:
        rows = queries.load([first_token + first, head * OPTIONS.head_dim])
    b, n = 0.0, 0.0
    if OPTIONS.normalizer == "ssa":
        b = tl.load(head_params + head * parameters)
        n = tl.load(head_params + head * parameters + 1)
    zeros = tl.full([OPTIONS.rows], 0, tl.float32)
    row = (zeros, zeros, zeros, zeros, zeros + b, zeros + n)
    factor = logit_factor(scale, OPTIONS)
    _, _, _, _, table, _, _, kv_head, _, _ = cache
    peak, total, _, _, _, _, _, output, _ = empty_state(OPTIONS, False)
    for start in tl.range(low, high, OPTIONS.keys, warp_specialize=True):
        if OPTIONS.contiguous:
            at = start
            logits = tl.dot(rows, keys.load([start, 0]).T)
        else:
            panel = tl.load(table + start // OPTIONS.keys) * kv_heads + kv_head
            at = panel * OPTIONS.keys
            logits = tl.dot(rows, keys.load([panel * OPTIONS.head_dim, 0]))
        before = (peak, total, 0.0, 0.0, 0.0)
        weights, after, shrunk = stream(logits, row, factor, before, OPTIONS, False, True, False)
        tile_values = values.load([at, 0])
        output = tl.dot(weights.to(tile_values.dtype), tile_values, output * shrunk[:, None])
        peak, total = after[0], after[1]
    member = first + tl.arange(0, OPTIONS.rows)
    stored = (member < count) & (low < high)
    number = row_numbers(first_token, count, member, head, q_heads, OPTIONS)
    channels = tl.arange(0, OPTIONS.value_dim)
    tl.store(sums + number * 8, peak, mask=stored)
    tl.store(sums + number * 8 + 1, total, mask=stored)
    tl.store(outputs + number[:, None] * OPTIONS.value_dim + channels[None, :], output, mask=stored[:, None])


@triton.jit
def add_full_tiles(state, sums, outputs, rows, stored, scale, OPTIONS: tl.constexpr):
    """The state of rows with what `prefill_full` has `stored` of them, the keys of other tiles."""
    peak, total, weighted_log, highest, lowest, visible, support, output, opposed = state
    factor = 1.0 if OPTIONS.peak_of_exponents else logit_factor(scale, OPTIONS)
    other = tl.load(sums + rows * 8, mask=stored, other=-float("inf"))
    moved = tl.maximum(peak, other)
    shift = finite_or_zero(moved)
    own, others = tl.exp2((peak - shift) * factor), tl.exp2((other - shift) * factor)
    total = total * own + tl.load(sums + rows * 8 + 1, mask=stored, other=0.0) * others
    at = outputs + rows[:, None] * OPTIONS.value_dim + tl.arange(0, OPTIONS.value_dim)[None, :]
    output = output * own[:, None] + tl.load(at, mask=stored[:, None], other=0.0) * others[:, None]
    return moved, total, weighted_log, highest, lowest, visible, support, output, opposed
