"""The first kernel of the op SharpAttention: it stores new keys and values behind the past, and writes the lengths."""

import triton
import triton.language as tl

from sharp.plugins.triton.plan import make_plan, present_lengths

INTEGERS = (
    *("tokens", "sequences", "kv_heads", "slots", "new_keys", "past", "counted", "stored"),
    *("max_blocks", "most_tokens", "units", "workers", "items", "window", "causal"),
)


@triton.jit(do_not_specialize=INTEGERS)
def write_present(
    key,
    value,
    key_cache,
    value_cache,
    past_lens,
    total_lens,
    query_start,
    context_lens,
    block_table,
    plan,
    tokens,
    sequences,
    kv_heads,
    slots,
    new_keys,
    past,
    counted,
    stored,
    max_blocks,
    most_tokens,
    units,
    workers,
    items,
    window,
    causal,
    OPTIONS: tl.constexpr,
):
    """Store a tile of `OPTIONS.rows` new keys and values, and write lengths and plan.

    Grid: tiles and one program for the plan, KV heads, sequences. `key` and `value` point to [sequences, kv_heads,
    new_keys, dim], `key_cache` and `value_cache` to [sequences, kv_heads, slots, dim].

    `past` is the number of keys before this call. It is negative if `past_lens` gives the numbers; then new keys that
    do not count or find no slot are not stored. `total_lens` is read if `counted` is not 0. If `stored` is 0, there is
    no past and the new keys stay where they are. The lengths that other kernels read are written here: `query_start`
    [sequences + 1], `context_lens` [sequences], and in `block_table` [sequences] the number of keys that count.
    """
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    queries = tokens // sequences
    lengths = (past_lens, total_lens, queries, new_keys, past, counted, slots)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if (kv_head == 0) & (sequence == 0):
            make_plan(plan, units, workers, items, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS)
        return
    first, total = present_lengths(sequence, lengths)
    if (tl.program_id(0) == 0) & (kv_head == 0):
        tl.store(query_start, 0, mask=sequence == 0)
        tl.store(query_start + sequence + 1, (sequence + 1) * queries)
        tl.store(context_lens + sequence, first)
        tl.store(block_table + sequence, total)
    if stored == 0:
        return
    index = tl.program_id(0) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    slot = first + index
    inside = (index < new_keys) & (slot >= 0) & (slot < tl.where(past < 0, total, slots))
    head = sequence.to(tl.int64) * kv_heads + kv_head

    channels = tl.arange(0, OPTIONS.head_width)
    within = inside[:, None] & (channels < OPTIONS.head_dim)[None, :]
    keys = tl.load(key + (head * new_keys + index)[:, None] * OPTIONS.head_dim + channels[None, :], mask=within)
    tl.store(key_cache + (head * slots + slot)[:, None] * OPTIONS.head_dim + channels[None, :], keys, mask=within)

    channels = tl.arange(0, OPTIONS.value_width)
    within = inside[:, None] & (channels < OPTIONS.value_dim)[None, :]
    values = tl.load(value + (head * new_keys + index)[:, None] * OPTIONS.value_dim + channels[None, :], mask=within)
    tl.store(value_cache + (head * slots + slot)[:, None] * OPTIONS.value_dim + channels[None, :], values, mask=within)
