"""Which tokens, heads and keys a program of decoding has, and where its rows lie in scratch memory."""

import triton
import triton.language as tl

from sharp.plugins.triton.loads import context_of, keys_of


@triton.jit
def sequence_of_token(query_start, sequences, token):
    """The sequence of a token, by bisection; the last one of a token behind all of them."""
    sequence = token * 0
    behind = sequence + sequences
    while behind - sequence > 1:
        middle = (sequence + behind) // 2
        found = tl.load(query_start + middle) <= token
        sequence, behind = tl.where(found, middle, sequence), tl.where(found, behind, middle)
    return sequence


@triton.jit
def unit_of(query_start, sequences, most_tokens, unit):
    """What is decoded together: sequence, first token, tokens (below 1: none), those before and in all in the sequence.

    A unit is a sequence with at most `most_tokens`. Where that is 0 a step has no more tokens than sequences, and a
    unit is a token: in nearly every such step each sequence has one, and if not, no other kernel need be launched.
    """
    sequence = unit
    first, end = tl.load(query_start + unit), tl.load(query_start + unit + 1)
    by_token = most_tokens == 0
    if by_token & ((first != unit) | (end != unit + 1)):
        sequence = sequence_of_token(query_start, sequences, unit)
        first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
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
def split_bounds(context_lens, block_table, unit, max_blocks, window, causal, split, splits, OPTIONS: tl.constexpr):
    """Which keys the tokens of a unit see: [begin, end), and a split's share of them: [low, high).

    Also where the first token stands, and how many of the splits have any keys at all.
    """
    sequence, _, taken, before, count = unit
    context = context_of(context_lens, sequence, max_blocks, OPTIONS)
    position = context + before
    end = keys_of(block_table, sequence, context, count, max_blocks, OPTIONS)
    if (causal != 0) | (window >= 0):  # only keys up to the token's own position are seen
        end = tl.minimum(end, position + taken)
    begin = tl.where(window >= 0, tl.maximum(position + 1 - window, 0), 0)
    first = begin // OPTIONS.keys * OPTIONS.keys
    tiles = (tl.cdiv(end - first, splits) + OPTIONS.keys - 1) // OPTIONS.keys
    length = tl.maximum(tiles, 1) * OPTIONS.keys
    low = first + split * length
    return position, begin, end, low, tl.minimum(low + length, end), tl.cdiv(end - first, length)


@triton.jit
def decode_rows(count, q_heads, kv_heads, OPTIONS: tl.constexpr):
    """The rows of this program: their KV head, heads, tokens of the sequence, and whether they exist."""
    group = q_heads // kv_heads
    head_blocks = (group + OPTIONS.rows - 1) // OPTIONS.rows  # 1 where a sequence may have more than one token
    kv_head = tl.program_id(1) // head_blocks
    member = tl.program_id(1) % head_blocks * OPTIONS.rows + tl.arange(0, OPTIONS.rows)
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
def is_prompts_token(query_start, sequences, most_tokens, token):
    """Whether a token is of a sequence that `prefill.py` takes."""
    sequence = sequence_of_token(query_start, sequences, token)
    first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
    return (token < end) & (end - first > most_tokens)
