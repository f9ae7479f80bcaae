"""Which tokens, heads and keys a program of decoding has, and where its rows lie in scratch memory."""

import triton
import triton.language as tl

from sharp.plugins.triton.loads import context_of, keys_of


@triton.jit
def sequence_of_token(query_start, sequences, token):
    """The sequence of a token, or of several, by bisection; the last one of a token behind all of them."""
    sequence = token * 0
    left = sequences
    while left > 1:
        half = left // 2
        sequence = tl.where(tl.load(query_start + sequence + half) <= token, sequence + half, sequence)
        left -= half
    return sequence


@triton.jit
def unit_of(query_start, sequences, most_tokens, unit):
    """What is decoded together: sequence, first token, tokens (below 1: none), those before and in all in the sequence.

    A unit is a sequence with at most `most_tokens`. Where that is 0 a step has no more tokens than sequences, and a
    unit is a token: in nearly every such step each sequence has one, and if not, no other kernel need be launched.
    """
    first, end = tl.load(query_start + unit), tl.load(query_start + unit + 1)
    sequence = unit
    if (most_tokens == 0) & ((first != unit) | (end != unit + 1)):
        sequence = sequence_of_token(query_start, sequences, unit)
        first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    return unit_within(sequence, first, end, unit, most_tokens)


@triton.jit
def unit_within(sequence, first, end, unit, most_tokens):
    """`unit_of` of a unit, or of several, in sequences whose tokens are [first, end)."""
    by_token = most_tokens == 0
    count = end - first
    before = tl.where(by_token, unit - first, 0)
    taken = tl.where(by_token, (unit < end).to(tl.int32), tl.where(count > most_tokens, 0, count))
    return sequence, first + before, taken, before, count


@triton.jit
def scratch_row(unit, token, most_tokens, q_heads, head):
    """The row (int64) of a unit's token in scratch memory.

    No two sequences overlap, as both numbers grow by their tokens at least, and the rows are as few as either says.
    """
    sequence, first, _, _, _ = unit
    start = tl.where(most_tokens == 0, first, tl.minimum(first, sequence * most_tokens))
    return (start + token).to(tl.int64) * q_heads + head


@triton.jit
def split_row(item, token, most_tokens, q_heads, head):
    """The row (int64) of a unit's token in the scratch memory of a work item: a split of the unit's keys."""
    return (item * tl.maximum(most_tokens, 1) + token).to(tl.int64) * q_heads + head


@triton.jit
def seen_keys(position, taken, keys, window, causal):
    """Which of a sequence's `keys` so many tokens from a position on see: [begin, end)."""
    past = (causal != 0) | (window >= 0)  # then only keys up to the token's own position
    begin = tl.where(window >= 0, tl.maximum(position + 1 - window, 0), position * 0)
    return begin, tl.where(past, tl.minimum(keys, position + taken), keys)


@triton.jit
def tiles_of(begin, end, OPTIONS: tl.constexpr):
    """How many tiles the keys [begin, end) are in."""
    return tl.maximum((end + OPTIONS.keys - 1) // OPTIONS.keys - begin // OPTIONS.keys, 0)


@triton.jit
def tiles_of_split(tiles, most):
    """How many of a unit's tiles a split has, `most` at most; the splits are alike."""
    return tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, most), 1)), 1)


@triton.jit
def split_bounds(context_lens, block_table, unit, max_blocks, window, causal, split, most, OPTIONS: tl.constexpr):
    """Which keys the tokens of a unit see: [begin, end), and a split's share of them: [low, high).

    Also where the first token stands, and how many splits there are. `most` is how many tiles a split has at most.
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
    """The KV head of this program, and the first of its rows, which are numbered token * group + head of the group."""
    rows = q_heads // kv_heads * tl.maximum(most_tokens, 1)
    blocks = (rows + OPTIONS.rows - 1) // OPTIONS.rows
    return tl.program_id(1) // blocks, tl.program_id(1) % blocks * OPTIONS.rows


@triton.jit
def rows_left(count, q_heads, kv_heads, most_tokens, OPTIONS: tl.constexpr):
    """How many rows a unit of `count` tokens has from this program's first on; below 1: none."""
    _, first = row_block(q_heads, kv_heads, most_tokens, OPTIONS)
    return count * (q_heads // kv_heads) - first


@triton.jit
def decode_rows(count, q_heads, kv_heads, most_tokens, OPTIONS: tl.constexpr):
    """The rows of this program: their KV head, heads, tokens of the sequence, and whether they exist."""
    group = q_heads // kv_heads
    kv_head, first = row_block(q_heads, kv_heads, most_tokens, OPTIONS)
    member = first + tl.arange(0, OPTIONS.rows)
    return kv_head, kv_head * group + member % group, member // group, member < count * group


@triton.jit
def row_bounds(position, end, window, causal):
    """`begin` and `end` of rows at these positions, in a sequence whose keys end at `end`."""
    begin = tl.where(window >= 0, tl.maximum(position + 1 - window, 0), 0)
    past = (causal != 0) | (window >= 0)
    return begin, tl.where(past, tl.minimum(position + 1, end), end)


@triton.jit
def rows_of_part(begin, end, part, parts, OPTIONS: tl.constexpr):
    """`begin` and `end` of a prompt's rows within one of the `parts` that the keys of their tile are split into."""
    first, last = tl.min(begin) // OPTIONS.keys * OPTIONS.keys, tl.max(end)
    length = tl.cdiv(tl.cdiv(last - first, OPTIONS.keys), parts) * OPTIONS.keys
    low = tl.minimum(first + part * length, last)  # parts without keys lie at the end and not behind it
    high = tl.minimum(low + length, last)
    return tl.minimum(tl.maximum(begin, low), high), tl.minimum(tl.maximum(end, low), high)


@triton.jit
def sums_of_launch(sums, stage, rows, parts):
    """What the parts of prompts have come to in a launch (`split_prefill.py`); `rows` are those of all tokens."""
    which = tl.where(stage == 0, 0, 2 - stage % 2)
    return sums + which.to(tl.int64) * rows * parts * 8


@triton.jit
def is_prompts_token(query_start, sequences, most_tokens, token):
    """Whether a token is of a sequence that `prefill.py` takes."""
    sequence = sequence_of_token(query_start, sequences, token)
    first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    return (token < end) & (end - first > most_tokens)
