"""The tokens, heads and keys of a program of decoding, and the places of its rows in scratch memory."""

import triton
import triton.language as tl

from sharp.plugins.triton.loads import context_of, keys_of


@triton.jit
def sequence_of_token(query_start, sequences, token):
    """Return the sequence of one or several tokens, found by bisection; the last sequence for tokens behind them all.

    `query_start` points to int32 [sequences + 1].
    """
    sequence = token * 0
    left = sequences
    while left > 1:
        half = left // 2
        sequence = tl.where(tl.load(query_start + sequence + half) <= token, sequence + half, sequence)
        left -= half
    return sequence


@triton.jit
def unit_of(query_start, sequences, most_tokens, unit):
    """Return a unit: sequence, first token, tokens (below 1: none), and its sequence's tokens before it and in all.

    A unit is what is decoded together: a sequence with at most `most_tokens` tokens. If `most_tokens` is 0, the step
    has no more tokens than sequences, and a unit is a token. In nearly every such step each sequence has one token, and
    if not, still no other kernel must be launched.
    """
    first, end = tl.load(query_start + unit), tl.load(query_start + unit + 1)
    sequence = unit
    if (most_tokens == 0) & ((first != unit) | (end != unit + 1)):
        sequence = sequence_of_token(query_start, sequences, unit)
        first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    return unit_within(sequence, first, end, unit, most_tokens)


@triton.jit
def unit_within(sequence, first, end, unit, most_tokens):
    """Return `unit_of` for one or several units in sequences whose tokens are [first, end)."""
    by_token = most_tokens == 0
    count = end - first
    before = tl.where(by_token, unit - first, 0)
    taken = tl.where(by_token, (unit < end).to(tl.int32), tl.where(count > most_tokens, 0, count))
    return sequence, first + before, taken, before, count


@triton.jit
def scratch_row(unit, token, most_tokens, q_heads, head):
    """Return the row (int64) of a unit's token and query head in scratch memory with a row for each token and head.

    `unit` is the tuple of `unit_of`; `token` counts from the unit's first.

    The start of a sequence's rows is the smaller of its first token and sequence * most_tokens. Sequences do not
    overlap, because both numbers grow at least by a sequence's tokens.
    """
    sequence, first, _, _, _ = unit
    start = tl.where(most_tokens == 0, first, tl.minimum(first, sequence * most_tokens))
    return (start + token).to(tl.int64) * q_heads + head


@triton.jit
def split_row(item, token, most_tokens, q_heads, head):
    """Return the row (int64) of a unit's token and query head in the scratch memory of a work item.

    A work item is a split of the unit's keys. Scratch memory is [items, tokens of a unit, q_heads, ...].
    """
    return (item * tl.maximum(most_tokens, 1) + token).to(tl.int64) * q_heads + head


@triton.jit
def seen_keys(position, taken, keys, window, causal):
    """Return the range [begin, end) of a sequence's first `keys` keys that `taken` tokens from `position` on see."""
    past = (causal != 0) | (window >= 0)  # then only keys up to the token's own position
    begin = tl.where(window >= 0, tl.maximum(position + 1 - window, 0), position * 0)
    return begin, tl.where(past, tl.minimum(keys, position + taken), keys)


@triton.jit
def tiles_of(begin, end, OPTIONS: tl.constexpr):
    """Return the number of tiles that contain the keys [begin, end)."""
    return tl.maximum((end + OPTIONS.keys - 1) // OPTIONS.keys - begin // OPTIONS.keys, 0)


@triton.jit
def tiles_of_split(tiles, most):
    """Return the number of tiles in each split of a unit, at most `most`; the splits are of equal size."""
    return tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, most), 1)), 1)


@triton.jit
def split_bounds(context_lens, block_table, unit, max_blocks, window, causal, split, most, OPTIONS: tl.constexpr):
    """Return a unit's first position and keys [begin, end), a split's keys [low, high), and the number of splits.

    `unit` is the tuple of `unit_of`, `split` the number of the split, `most` the maximum number of tiles in a split. If
    the split has no keys, low >= high.
    """
    sequence, _, taken, before, count = unit
    context = context_of(context_lens, sequence, max_blocks, OPTIONS)
    position = context + before
    keys = keys_of(block_table, sequence, context, count, max_blocks, OPTIONS)
    begin, end = seen_keys(position, taken, keys, window, causal)
    tiles = tiles_of(begin, end, OPTIONS)
    each = tiles_of_split(tiles, most)
    low = (begin // OPTIONS.keys + split * each) * OPTIONS.keys
    high = tl.minimum(low + each * OPTIONS.keys, end)
    return position, begin, end, low, high, tl.cdiv(tiles, each)


@triton.jit
def row_block(q_heads, kv_heads, most_tokens, OPTIONS: tl.constexpr):
    """Return the KV head of this program and its first row; rows are numbered token * group + head of the group."""
    rows = q_heads // kv_heads * tl.maximum(most_tokens, 1)
    blocks = (rows + OPTIONS.rows - 1) // OPTIONS.rows
    return tl.program_id(1) // blocks, tl.program_id(1) % blocks * OPTIONS.rows


@triton.jit
def rows_left(count, q_heads, kv_heads, most_tokens, OPTIONS: tl.constexpr):
    """Return the number of rows of a unit of `count` tokens from this program's first row on; below 1: none."""
    _, first = row_block(q_heads, kv_heads, most_tokens, OPTIONS)
    return count * (q_heads // kv_heads) - first


@triton.jit
def decode_rows(count, q_heads, kv_heads, most_tokens, OPTIONS: tl.constexpr):
    """Return the rows of this program: their KV head, heads, tokens, and whether they exist; [rows] but the KV head.

    Tokens count from the unit's first token. `count` is the number of tokens of the unit.
    """
    group = q_heads // kv_heads
    kv_head, first = row_block(q_heads, kv_heads, most_tokens, OPTIONS)
    member = first + tl.arange(0, OPTIONS.rows)
    return kv_head, kv_head * group + member % group, member // group, member < count * group


@triton.jit
def row_bounds(position, end, window, causal):
    """Return `begin` and `end` of the keys that rows at these positions see, in a sequence whose keys end at `end`."""
    begin = tl.where(window >= 0, tl.maximum(position + 1 - window, 0), 0)
    past = (causal != 0) | (window >= 0)
    return begin, tl.where(past, tl.minimum(position + 1, end), end)


@triton.jit
def rows_of_part(begin, end, part, parts, OPTIONS: tl.constexpr):
    """Return `begin` and `end` of a prompt's rows, limited to one of the `parts` of the keys of their tile."""
    first, last = tl.min(begin) // OPTIONS.keys * OPTIONS.keys, tl.max(end)
    length = tl.cdiv(tl.cdiv(last - first, OPTIONS.keys), parts) * OPTIONS.keys
    low = tl.minimum(first + part * length, last)  # parts without keys lie at the end of the keys, not behind it
    high = tl.minimum(low + length, last)
    return tl.minimum(tl.maximum(begin, low), high), tl.minimum(tl.maximum(end, low), high)


@triton.jit
def sums_of_launch(sums, stage, rows, parts):
    """Return the pointer to the sums that the launch number `stage` over a split prompt stores, [rows, parts, 8].

    Launch 0 has set 0; later launches alternate between the sets 1 and 2. `rows` is the number of rows of all tokens.
    """
    which = tl.where(stage == 0, 0, 2 - stage % 2)
    return sums + which.to(tl.int64) * rows * parts * 8


@triton.jit
def is_prompts_token(query_start, sequences, most_tokens, token):
    """Return whether a token belongs to a sequence that `prefill.py` computes."""
    sequence = sequence_of_token(query_start, sequences, token)
    first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    return (token < end) & (end - first > most_tokens)
