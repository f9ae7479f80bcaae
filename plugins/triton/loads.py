"""The loads of the kernels: rows of queries, keys and values through the block table, and the parameters of heads.

The tuples `row` and `cache` are those of `walk.py`. MAPPED: every key of the tile is known to have a block.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import INTERPRETED, in_bfloat16
from sharp.plugins.triton.e4m3 import BFLOAT16_OF_E4M3, FLOAT16_OF_E4M3, decoded

# Four bytes, integers of 8 bits, become four 16-bit floats. In bfloat16, where 128 has zeros in its last seven bits,
# the lower seven bits of the integer are put into 128, and 128 is subtracted, or 256 if the integer is negative. In
# float16 the integer is added to the bits of 1024 + 128, which is then subtracted. The code is declared impure.
# Otherwise Triton would convert byte by byte after distributing the operands to threads, which takes 1.5 times as many
# instructions.
BFLOAT16 = tl.constexpr("""{
.reg .b32 low, high, bits, sign, one;
mov.b32 one, 0xBF80BF80;
prmt.b32 low, $2, 0, 0x4140;
prmt.b32 high, $2, 0, 0x4342;
lop3.b32 bits, low, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, low, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, sign, one, bits;
lop3.b32 bits, high, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, high, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 $1, sign, one, bits;
}""")
FLOAT16 = tl.constexpr("""{
.reg .b32 shifted, magic, low, high;
mov.b32 magic, 0x64806480;
xor.b32 shifted, $2, 0x80808080;
prmt.b32 low, shifted, 0x64646464, 0x4140;
prmt.b32 high, shifted, 0x64646464, 0x4342;
sub.f16x2 $0, low, magic;
sub.f16x2 $1, high, magic;
}""")


@triton.jit
def load_query(query, rows, exists, OPTIONS: tl.constexpr):
    """Return query rows [rows, head_width] by their numbers `rows` (int64); zeros for rows that do not `exist`.

    The result is a tuple of `OPTIONS.query_parts` tensors, whose sum is the query. `query` points to rows of head_dim.
    """
    channels = tl.arange(0, OPTIONS.head_width)
    offsets = rows * OPTIONS.head_dim
    inside = exists[:, None]
    if OPTIONS.head_width != OPTIONS.head_dim:
        inside = inside & (channels < OPTIONS.head_dim)[None, :]
    loaded = tl.load(query + offsets[:, None] + channels[None, :], mask=inside, other=0.0)
    return in_bfloat16(loaded, OPTIONS.query_parts) if OPTIONS.query_parts > 1 else (loaded,)


@triton.jit
def row_numbers(first, count, token, heads, q_heads, OPTIONS: tl.constexpr):
    """Return the rows' numbers (int64) in queries, outputs and statistics.

    `token` [rows] counts from `first`, the sequence's first token; `heads` [rows] are query heads. `count` is the
    sequence's number of tokens, which is read for contiguous queries only.
    """
    if OPTIONS.contiguous:  # [sequences, q_heads, tokens of a sequence]
        rows = first.to(tl.int64) * q_heads + heads * count + token
    else:  # [tokens, q_heads]
        rows = (first + token).to(tl.int64) * q_heads + heads
    return rows


@triton.jit
def context_of(context_lens, sequence, max_blocks, OPTIONS: tl.constexpr):
    """Return a sequence's number of keys before this step, limited to the block table's room.

    The host cannot see the number, so an invalid one must not make positions overflow.
    """
    return tl.minimum(tl.load(context_lens + sequence), max_blocks * OPTIONS.block_size)


@triton.jit
def keys_of(block_table, sequence, context, count, max_blocks, OPTIONS: tl.constexpr):
    """Return a sequence's number of keys, including those of its `count` tokens in this step.

    For contiguous keys the number is read from `block_table` [sequences]; otherwise it is limited to the block table.
    """
    if OPTIONS.contiguous:
        keys = tl.load(block_table + sequence)
    else:
        keys = tl.minimum(context + count, max_blocks * OPTIONS.block_size)
    return keys


@triton.jit
def head_values(head_params, alibi_slopes, heads, exists, parameters, OPTIONS: tl.constexpr):
    """Return the ALiBi slope and the parameters b and n of the rows' `heads`, float32 [rows] each, 0 where absent.

    For sigmoid b is the bias and n the power; for relu and relu2 b is the power. `parameters` is the width of
    `head_params`, 0 if it is absent.
    """
    slope = tl.full([OPTIONS.rows], 0, tl.float32)
    b, n = slope, slope
    if OPTIONS.alibi:
        slope = tl.load(alibi_slopes + heads, mask=exists, other=0.0)
    if OPTIONS.normalizer == "ssa":
        b = tl.load(head_params + heads * parameters, mask=exists, other=0.0)
        n = tl.load(head_params + heads * parameters + 1, mask=exists, other=0.0)
    if OPTIONS.pointwise:
        given = exists & (heads * 0 + parameters > 0)
        b = tl.load(head_params + heads * parameters, mask=given, other=0.0)
        if OPTIONS.normalizer == "sigmoid":
            n = tl.load(head_params + heads * parameters + 1, mask=given, other=0.0)
    return slope, b, n


@triton.jit
def sink_of(head_params, heads, exists, parameters, OPTIONS: tl.constexpr):
    """Return the logits of the sinks of `heads` (one head, or [rows]); -infinity without a column of sinks.

    `parameters` is the width of `head_params`, 0 if it is absent.
    """
    width = heads * 0 + parameters  # one number per row; in the interpreter a scalar comparison would give a plain bool
    given = exists & (width > OPTIONS.own_parameters)
    return tl.load(head_params + heads * parameters + OPTIONS.own_parameters, mask=given, other=-float("inf"))


@triton.jit
def blocks_of(keys, OPTIONS: tl.constexpr):
    """Return the number of cache blocks that hold the first `keys` keys of a sequence."""
    return (keys + OPTIONS.block_size - 1) // OPTIONS.block_size


@triton.jit
def cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """Return a walk's `cache`: the pointers to one sequence's keys and values, and the range of keys to read.

    The tuple is (key_cache, value_cache, key_scale, value_scale, table, begin, end, kv_head, kv_heads, slots);
    `tensors` are the first four. `table` points to the sequence's row of the block table, or is the offset of the
    head's first key if keys are contiguous. `slots` is the number of slots of all blocks, or of a contiguous head.
    """
    key_cache, value_cache, key_scale, value_scale = tensors
    if OPTIONS.contiguous:
        table = (sequence.to(tl.int64) * kv_heads + kv_head) * slots
    else:
        table = block_table + sequence.to(tl.int64) * max_blocks
    return key_cache, value_cache, key_scale, value_scale, table, begin, end, kv_head, kv_heads, slots


@triton.jit
def every_block_mapped(low, high, cache, OPTIONS: tl.constexpr):
    """Return whether all keys in [low, high), by whole blocks, have a block, so that loops need not check each key."""
    highest = (low * 0).to(tl.uint32)  # unsigned, so that -1 is above every block
    behind = highest + 1
    if not OPTIONS.contiguous:
        _, _, _, _, table, _, _, _, _, slots = cache
        behind = (slots // OPTIONS.block_size).to(tl.uint32)
        blocks = blocks_of(high, OPTIONS)
        # The loop carries a scalar and not a tensor, because Triton does not pipeline loops whose bounds depend on a
        # tensor carried by another loop.
        for start in tl.range(low // OPTIONS.block_size, blocks, 1024):
            index = start + tl.arange(0, 1024)
            page = tl.load(table + index, mask=index < blocks, other=0)
            highest = tl.maximum(highest, tl.max(page.to(tl.uint32)))
    return highest < behind


@triton.jit
def visible_keys(low, high, mapped, row, cache, OPTIONS: tl.constexpr):
    """Return the number of keys in [low, high) that each row sees, float32 [rows].

    `mapped` is whether every key has a block; otherwise each key's block is looked up, and keys without one are not
    counted. `row` and `cache` are those of a walk.
    """
    _, begin, end, _, _, _ = row
    visible = tl.maximum(tl.minimum(end, high) - tl.maximum(begin, low), 0).to(tl.float32)
    if not mapped:
        visible = visible * 0
        for tile in tl.range(low // OPTIONS.keys, tl.cdiv(high, OPTIONS.keys)):
            start = tile * OPTIONS.keys
            page = load_pages(start, cache, OPTIONS, False)
            key = tl.where(page >= 0, start + tl.arange(0, OPTIONS.keys), -1)[None, :]
            visible += tl.sum(((key >= begin[:, None]) & (key < end[:, None])).to(tl.float32), 1)
    return visible


@triton.jit
def length_term(row, cache, parameters, OPTIONS: tl.constexpr):
    """Return the effect of the number n of keys that each row sees: bias - power ln n for sigmoid, n^-power for relu.

    The result, float32 [rows], takes the place of the row's b. `row` and `cache` are a walk's over all keys, not over a
    part. If `parameters`, the width of head_params, is 0, the result is 0 for sigmoid and 1 for relu and relu2.
    """
    _, begin, end, _, b, n = row
    log_count = b * 0
    if parameters > 0:
        low, high = tl.min(begin), tl.max(end)
        mapped = every_block_mapped(low, high, cache, OPTIONS)
        log_count = tl.log(tl.maximum(visible_keys(low, high, mapped, row, cache, OPTIONS), 1.0))
    return b - n * log_count if OPTIONS.normalizer == "sigmoid" else tl.exp(-b * log_count)


@triton.jit
def load_pages(start, cache, OPTIONS: tl.constexpr, MAPPED: tl.constexpr):
    """Return the block of every key of the tile at `start`, or -1; by whole blocks, so that loads of keys stay vectors.

    The result is int32 [keys]. MAPPED: every key of the tile is known to have a block. `cache` is a walk's.

    The host cannot see the block table, so a number that is no block of the cache counts as -1.

    A block is looked up once and not once for each of its keys. In prefill the registers for the latter made the
    assembler wait for every single matrix product. All contiguous keys are in block 0, up to the last key.
    """
    _, _, _, _, table, _, end, _, _, slots = cache
    if OPTIONS.contiguous:
        index = tl.arange(0, OPTIONS.keys)
        page = index * 0 if MAPPED else tl.where(start + index < end, 0, -1)
    else:
        BLOCKS: tl.constexpr = OPTIONS.blocks
        KEYS: tl.constexpr = OPTIONS.keys // OPTIONS.blocks  # of a block, in this tile
        index = start // OPTIONS.block_size + tl.arange(0, BLOCKS)
        if MAPPED:
            page = tl.load(table + index)
        else:
            page = tl.load(table + index, mask=index < blocks_of(end, OPTIONS), other=-1)
            page = tl.where(page < slots // OPTIONS.block_size, page, -1)
        page = tl.broadcast_to(page[:, None], [BLOCKS, KEYS])
        page = tl.max_constancy(tl.reshape(page, [OPTIONS.keys]), KEYS)
    return page


@triton.jit
def load_keys(start, page, cache, OPTIONS: tl.constexpr, MAPPED: tl.constexpr):
    """Return the keys of the tile at `start`, [head_width, keys] of `OPTIONS.key_element`, and their scales.

    Scales are float32 [keys], or 1.0 if the cache has none. Keys whose `page` (their block, from `load_pages`) is
    negative are 0. A block's panel is [head_dim, block_size]; contiguous keys are [keys, head_dim].
    """
    key_cache, _, key_scale, _, table, _, _, kv_head, kv_heads, _ = cache
    channels = tl.arange(0, OPTIONS.head_width)
    index = tl.arange(0, OPTIONS.keys)
    inside = tl.full([1, 1], True, tl.int1) if MAPPED else (page >= 0)[None, :]
    if OPTIONS.head_width != OPTIONS.head_dim:
        inside = inside & (channels < OPTIONS.head_dim)[:, None]
    if OPTIONS.contiguous:
        tile = key_cache + (table + start) * OPTIONS.head_dim
        pointers = tile + index[None, :] * OPTIONS.head_dim + channels[:, None]
    else:
        panel = (page.to(tl.int64) * kv_heads + kv_head) * (OPTIONS.head_dim * OPTIONS.block_size)
        offsets = panel + (start + index) % OPTIONS.block_size
        pointers = key_cache + offsets[None, :] + channels[:, None] * OPTIONS.block_size
    scales = block_scale(key_scale, page, cache, MAPPED) if OPTIONS.quantized else 1.0
    return converted(tl.load(pointers, mask=inside, other=0), OPTIONS.key_element), scales


@triton.jit
def load_values(start, used, page, cache, OPTIONS: tl.constexpr, MAPPED: tl.constexpr):
    """Return the values of the tile at `start`, [keys, value_width] of `OPTIONS.value_element`, and their scales.

    Scales are float32 [keys], or 1.0 if the cache has none. Values of keys that are not `used` [keys] are 0, unless the
    tile is MAPPED: then all are read. `page` is that of `load_pages`. Values that no row sees are not read, because
    they may be NaN.
    """
    _, value_cache, _, value_scale, table, _, _, kv_head, kv_heads, _ = cache
    channels = tl.arange(0, OPTIONS.value_width)
    index = tl.arange(0, OPTIONS.keys)
    inside = tl.full([1, 1], True, tl.int1) if MAPPED else used[:, None]
    if OPTIONS.value_width != OPTIONS.value_dim:
        inside = inside & (channels < OPTIONS.value_dim)[None, :]
    if OPTIONS.contiguous:
        tile = value_cache + (table + start) * OPTIONS.value_dim
        pointers = tile + index[:, None] * OPTIONS.value_dim + channels[None, :]
    else:
        panel = (page.to(tl.int64) * kv_heads + kv_head) * OPTIONS.block_size
        offsets = (panel + (start + index) % OPTIONS.block_size) * OPTIONS.value_dim
        pointers = value_cache + offsets[:, None] + channels[None, :]
    scales = 1.0
    if OPTIONS.quantized:
        scales = block_scale(value_scale, page, cache, MAPPED)
        scales = scales if MAPPED else tl.where(used, scales, 0.0)
    return converted(tl.load(pointers, mask=inside, other=0), OPTIONS.value_element), scales


@triton.jit
def converted(numbers, ELEMENT: tl.constexpr):
    """Return numbers of a cache as operands of matrix products, of type ELEMENT, exact for 8 bits. uint8 is e4m3."""
    if numbers.dtype == tl.uint8:
        if INTERPRETED:
            result = decoded(numbers.to(tl.int32)).to(ELEMENT)
        elif tl.bfloat16 == ELEMENT:
            result = tl.inline_asm_elementwise(
                BFLOAT16_OF_E4M3, "=r,=r,r", [numbers], tl.bfloat16, is_pure=False, pack=4
            )
        else:
            result = tl.inline_asm_elementwise(FLOAT16_OF_E4M3, "=r,=r,r", [numbers], tl.float16, is_pure=False, pack=4)
    elif numbers.dtype != tl.int8:
        result = numbers.to(ELEMENT)
    elif INTERPRETED:  # the interpreter would take the integer for the bits of a bfloat16
        result = numbers.to(tl.float32).to(ELEMENT)
    elif tl.bfloat16 == ELEMENT:
        result = tl.inline_asm_elementwise(BFLOAT16, "=r,=r,r", [numbers], tl.bfloat16, is_pure=False, pack=4)
    else:
        result = tl.inline_asm_elementwise(FLOAT16, "=r,=r,r", [numbers], tl.float16, is_pure=False, pack=4)
    return result


@triton.jit
def block_scale(scale, page, cache, MAPPED: tl.constexpr):
    """Return the scale of every key's block, float32 [keys]; 0 for keys without a block."""
    _, _, _, _, _, _, _, kv_head, kv_heads, _ = cache
    pointers = scale + page.to(tl.int64) * kv_heads + kv_head
    return tl.load(pointers) if MAPPED else tl.load(pointers, mask=page >= 0, other=0.0)
