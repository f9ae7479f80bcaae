"""Which tokens, heads and keys a program of decoding has, and where its rows lie in scratch memory."""

import triton
import triton.language as tl

from sharp.plugins.triton.loads import context_of, keys_of


@triton.jit
def tokens_of(query_start, sequence):
    """The sequence's first token, and how many it has."""
    first = tl.load(query_start + sequence)
    return first, tl.load(query_start + sequence + 1) - first


@triton.jit
def scratch_row(first, token, sequence, most_tokens, q_heads, head):
    """The row (int64) of a token, counted from the sequence's `first`, in scratch memory.

    No two sequences overlap, as both numbers grow by their tokens at least, and the rows are as few as either says.
    """
    return (tl.minimum(first, sequence * most_tokens) + token).to(tl.int64) * q_heads + head


@triton.jit
def split_bounds(
    context_lens, block_table, sequence, count, max_blocks, window, causal, split, splits, OPTIONS: tl.constexpr
):
    """Which keys the sequence's `count` tokens see: [begin, end), and a split's share of them: [low, high).

    Also where its first token stands, and how many of the splits have any keys at all.
    """
    position = context_of(context_lens, sequence, max_blocks, OPTIONS)
    end = keys_of(block_table, sequence, position, count, max_blocks, OPTIONS)
    if (causal != 0) | (window >= 0):  # only keys up to the token's own position are seen
        end = tl.minimum(end, position + count)
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
