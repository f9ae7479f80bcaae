"""The plan of a decode step: which keys of which sequence each program has, made on the device.

The host sees neither the lengths of sequences nor which tokens are whose, and grids follow from shapes. So the first
kernel of a step cuts the keys of all units (`rows.py`) into splits of about equal size, whatever sequences they are of:
about as many as there are `workers`, programs that the device should have, and one more for each unit at most. A
program of decoding has one of them, its work item; those behind the last item end at once.

Scratch memory `plan`, int32 [1 + units + items]: how many tiles of keys a split has at most; of every unit its first
item; of every item its unit, -1 behind the last one.
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
UNITS = tl.constexpr(256)  # that are looked at together


@triton.jit
def present_lengths(sequence, lengths):
    """Keys of contiguous sequences before and after a call; `lengths` as in `unit_tiles`."""
    past_lens, total_lens, _, new_keys, past, counted, slots = lengths
    first = tl.load(past_lens + sequence, mask=past < 0, other=past)
    total = first + new_keys
    total = tl.minimum(total, tl.load(total_lens + sequence, mask=counted != 0, other=total))
    return first, tl.maximum(tl.minimum(total, slots), 0)


@triton.jit
def unit_tiles(units, index, lengths, sequences, most_tokens, max_blocks, window, causal, OPTIONS: tl.constexpr):
    """Tiles of keys that units see, by their number; 0 of those behind the last.

    `lengths` are query_start and context_lens, or of contiguous keys past_lens, total_lens, queries of a sequence,
    new_keys, past, counted and slots: what other kernels read of them is not written yet.
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
    """Writes the `plan`; for one program."""
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
    """The unit of a work item, which of its splits it is, and the most tiles of a split; no tokens if there is none."""
    index = tl.load(plan + 1 + units + item)
    number = tl.maximum(index, 0)
    sequence, first, taken, before, count = unit_of(query_start, sequences, most_tokens, number)
    unit = (sequence, first, tl.where(index < 0, 0, taken), before, count)
    return unit, item - tl.load(plan + 1 + number), tl.load(plan)


@triton.jit
def splits_of(plan, index, unit, context_lens, block_table, max_blocks, window, causal, OPTIONS: tl.constexpr):
    """The first work item of a unit, how many it has, and which keys its tokens see: [begin, end)."""
    _, begin, end, _, _, splits = split_bounds(
        context_lens, block_table, unit, max_blocks, window, causal, 0, tl.load(plan), OPTIONS
    )
    return tl.load(plan + 1 + index), splits, begin, end
