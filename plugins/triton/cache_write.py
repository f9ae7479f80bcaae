"""The first kernel of a step: new keys and values into their slots, and zeros where no other kernel writes."""

import triton
import triton.language as tl

INTEGERS = ("tokens", "sequences", "q_heads", "kv_heads")


@triton.jit(do_not_specialize=INTEGERS)
def write_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    query_start,
    output,
    stats,
    tokens,
    sequences,
    q_heads,
    kv_heads,
    OPTIONS: tl.constexpr,
):
    """Tiles of `OPTIONS.rows` tokens and one KV head. Grid: token tiles, KV heads.

    A slot of -1 is not stored. The output of tokens behind the last sequence's becomes 0, and so do all statistics.
    """
    kv_head = tl.program_id(1)
    token = tl.program_id(0) * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
    exists = token < tokens
    slot = tl.load(slot_mapping + token, mask=exists, other=-1)
    stored = slot >= 0
    row = token.to(tl.int64) * kv_heads + kv_head
    panel = (slot // OPTIONS.block_size).to(tl.int64) * kv_heads + kv_head
    offset = slot % OPTIONS.block_size

    channels = tl.arange(0, OPTIONS.head_width)
    within = channels < OPTIONS.head_dim
    inside = stored[:, None] & within[None, :]
    keys = tl.load(key + row[:, None] * OPTIONS.head_dim + channels[None, :], mask=inside, other=0.0)
    place = panel * (OPTIONS.head_dim * OPTIONS.block_size) + offset
    # Transposed, so that neighbouring threads write neighbouring slots.
    at = key_cache + place[None, :] + channels[:, None] * OPTIONS.block_size
    tl.store(at, tl.trans(keys).to(key_cache.dtype.element_ty), mask=within[:, None] & stored[None, :])

    channels = tl.arange(0, OPTIONS.value_width)
    within = channels < OPTIONS.value_dim
    inside = stored[:, None] & within[None, :]
    values = tl.load(value + row[:, None] * OPTIONS.value_dim + channels[None, :], mask=inside, other=0.0)
    at = value_cache + (panel * OPTIONS.block_size + offset)[:, None] * OPTIONS.value_dim + channels[None, :]
    tl.store(at, values.to(value_cache.dtype.element_ty), mask=inside)

    group = q_heads // kv_heads
    unused = exists & (token >= tl.load(query_start + sequences))
    columns = tl.arange(0, 4)
    for member in tl.range(0, group):
        head = token.to(tl.int64) * q_heads + kv_head * group + member
        tl.store(stats + head[:, None] * 4 + columns[None, :], 0.0, mask=exists[:, None])
        at = output + head[:, None] * OPTIONS.value_dim + channels[None, :]
        tl.store(at, 0.0, mask=unused[:, None] & within[None, :])
