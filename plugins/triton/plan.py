"""The plan of a decode step, made on the device: which keys of which sequence each program computes.

The host sees neither the lengths of sequences nor which tokens belong to which sequence, and grids follow from shapes.
So the first kernel of a step cuts the keys of all units (`rows.py`) into splits of about equal size, across sequences.
The number of splits is about `workers`, the number of programs that the device should have, and at most one more per
unit. Each program of decoding computes one split, its work item; programs behind the last item end at once.

Scratch memory `plan`, int32 [1 + units + items]: the maximum number of tiles of keys in a split; for every unit its
first item; for every item its unit, -1 behind the last item.
"""

import triton
import triton.language as tl

from sharp.plugins.triton import options
from sharp.plugins.triton.loads import context_of
from sharp.plugins.triton.rows import (
    seen_keys,
    sequence_of_token,
    split_bounds,
    tiles_of,
    tiles_of_split,
    unit_of,
    unit_within,
)

SPLIT_KEYS = tl.constexpr(options.SPLIT_KEYS)
MOST_SPLITS = tl.constexpr(options.MOST_SPLITS)
UNITS = tl.constexpr(256)  # units that are processed together


@triton.jit
def present_lengths(sequence, lengths):
    """Return the numbers of keys of contiguous sequences before and after a call.

    `lengths` is (past_lens, total_lens, queries per sequence, new_keys, past, counted, slots). `past_lens` is read if
    `past` is negative, `total_lens` if `counted` is not 0. The second number is limited to `slots`.
    """
    past_lens, total_lens, _, new_keys, past, counted, slots = lengths
    first = tl.load(past_lens + sequence, mask=past < 0, other=past)
    total = first + new_keys
    total = tl.minimum(total, tl.load(total_lens + sequence, mask=counted != 0, other=total))
    return first, tl.maximum(tl.minimum(total, slots), 0)


@triton.jit
def unit_tiles(units, index, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS: tl.constexpr):
    """Return the number of tiles of keys that units (by their numbers `index`) see; 0 for numbers behind the last unit.

    A unit is a sequence, or one token if `most_tokens` is 0. Sequences of more tokens are prompts and count 0.

    `lengths` are query_start and context_lens; for contiguous keys past_lens, total_lens, queries per sequence,
    new_keys, past, counted and slots, because the buffers that other kernels read instead are not written yet.
    """
    unit = tl.minimum(index, units - 1)
    if OPTIONS.contiguous:
        position, keys = present_lengths(unit, lengths)
        position = tl.minimum(position, max_blocks * OPTIONS.block_size)
        taken = tl.where(lengths[2] > tl.maximum(most_tokens, 1), 0, lengths[2])
    else:
        query_start, context_lens = lengths
        first, end = tl.load(query_start + unit), tl.load(query_start + unit + 1)
        sequence = unit
        unlike = ((first != unit) | (end != unit + 1)).to(tl.int32)
        if (most_tokens == 0) & (tl.max(unlike, 0) > 0):
            sequence = sequence_of_token(query_start, sequences, unit)
            first, end = tl.load(query_start + sequence), tl.load(query_start + sequence + 1)
        _, _, taken, before, count = unit_within(sequence, first, end, unit, most_tokens)
        context = context_of(context_lens, sequence, max_blocks, OPTIONS)
        position, keys = context + before, tl.minimum(context + count, max_blocks * OPTIONS.block_size)
    begin, end = seen_keys(position, taken, keys, window, causal)
    return tl.where((index < units) & (taken > 0), tiles_of(begin, end, OPTIONS), 0)


@triton.jit
def make_plan(
    plan, units, workers, items, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS: tl.constexpr
):
    """Write the `plan`, int32 [1 + units + items]; called by one program.

    The plan is the maximum number of tiles of keys in a split; for every unit its first item; for every item its unit,
    -1 behind the last item. `workers` is the number of programs to aim at. `lengths` is that of `unit_tiles`.
    """
    tiles_in_all, longest = units * 0, units * 0
    for start in tl.range(0, units, UNITS):
        index = start + tl.arange(0, UNITS)
        tiles = unit_tiles(units, index, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS)
        tiles_in_all += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    LEAST: tl.constexpr = SPLIT_KEYS // OPTIONS.keys
    most = tl.maximum(tl.maximum(tl.cdiv(tiles_in_all, workers), tl.cdiv(longest, MOST_SPLITS)), LEAST)
    tl.store(plan, most)
    first_of, unit_of_item = plan + 1, plan + 1 + units
    item = units * 0
    for start in tl.range(0, units, UNITS):
        index = start + tl.arange(0, UNITS)
        tiles = unit_tiles(units, index, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS)
        splits = tl.cdiv(tiles, tiles_of_split(tiles, most))
        first = item + tl.cumsum(splits, 0) - splits
        tl.store(first_of + index, first, mask=index < units)
        for split in tl.range(0, tl.max(splits, 0)):
            tl.store(unit_of_item + first + split, index, mask=split < splits)
        item += tl.sum(splits, 0)
    for start in tl.range(item, items, UNITS):
        index = start + tl.arange(0, UNITS)
        tl.store(unit_of_item + index, -1, mask=index < items)


@triton.jit
def item_of(plan, units, query_start, sequences, most_tokens, item):
    """Return a work item's unit, the number of its split in the unit, and the maximum tiles of a split.

    The unit is (sequence, first token, tokens, the sequence's tokens before it, the sequence's tokens in all), as from
    `unit_of`; it has 0 tokens if there is no such item.
    """
    index = tl.load(plan + 1 + units + item)
    number = tl.maximum(index, 0)
    sequence, first, taken, before, count = unit_of(query_start, sequences, most_tokens, number)
    unit = (sequence, first, tl.where(index < 0, 0, taken), before, count)
    return unit, item - tl.load(plan + 1 + number), tl.load(plan)


@triton.jit
def splits_of(plan, index, unit, context_lens, block_table, max_blocks, window, causal, OPTIONS: tl.constexpr):
    """Return the first work item of a unit, the number of its items, and the keys [begin, end) that its tokens see.

    `index` is the unit's number, `unit` the tuple of `unit_of`.
    """
    _, begin, end, _, _, splits = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, 0, tl.load(plan), OPTIONS
    )
    return tl.load(plan + 1 + index), splits, begin, end
