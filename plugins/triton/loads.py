"""What the kernels read: rows of queries, keys and values by way of the block table, and what is known per head.

The tuples `row` and `cache` are those of `walk.py`. MAPPED: every key of the tile is known to have a block.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import INTERPRETED, in_bfloat16
from sharp.plugins.triton.e4m3 import BFLOAT16_OF_E4M3, FLOAT16_OF_E4M3, decoded

# Four integers of 8 bits, by their bytes. In bfloat16, whose 128 has zeros in its last seven bits: 128 with the lower
# seven bits of an integer, less 128 or, with the sign before them, 256. In float16: 1024 + 128 with the integer added,
# less that. They are not pure, or Triton would convert behind what distributes operands to threads, byte by byte, which
# takes half as many instructions again.
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
    """Query rows [rows, head_width], by their number (int64), as a tuple of parts; zeros where a row does not exist."""
    channels = tl.arange(0, OPTIONS.head_width)
    offsets = rows * OPTIONS.head_dim
    inside = exists[:, None]
    if OPTIONS.head_width != OPTIONS.head_dim:
        inside = inside & (channels < OPTIONS.head_dim)[None, :]
    loaded = tl.load(query + offsets[:, None] + channels[None, :], mask=inside, other=0.0)
    return in_bfloat16(loaded, OPTIONS.query_parts) if OPTIONS.query_parts > 1 else (loaded,)


@triton.jit
def row_numbers(first, count, token, heads, q_heads, OPTIONS: tl.constexpr):
    """Where rows stand among queries, outputs and statistics (int64); `token` counts from the sequence's `first`."""
    if OPTIONS.contiguous:  # [sequences, q_heads, tokens of a sequence]
        rows = first.to(tl.int64) * q_heads + heads * count + token
    else:  # [tokens, q_heads]
        rows = (first + token).to(tl.int64) * q_heads + heads
    return rows


@triton.jit
def context_of(context_lens, sequence, max_blocks, OPTIONS: tl.constexpr):
    """How many keys a sequence has before this step. The host cannot see it: what is no length must not wrap around."""
    return tl.minimum(tl.load(context_lens + sequence), max_blocks * OPTIONS.block_size)


@triton.jit
def keys_of(block_table, sequence, context, count, max_blocks, OPTIONS: tl.constexpr):
    """How many keys a sequence has, with those of its `count` tokens in this step."""
    if OPTIONS.contiguous:
        keys = tl.load(block_table + sequence)
    else:
        keys = tl.minimum(context + count, max_blocks * OPTIONS.block_size)
    return keys


@triton.jit
def head_values(head_params, alibi_slopes, heads, exists, parameters, OPTIONS: tl.constexpr):
    """Slope, b and n of the rows' heads, of sigmoid bias and power, of relu power and 0; zeros where there is none."""
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
    """The logits of the heads' sinks, -infinity where they have none; of one head or of rows."""
    width = heads * 0 + parameters  # of the rows, as the interpreter would make a number of one comparison for all
    given = exists & (width > OPTIONS.own_parameters)
    return tl.load(head_params + heads * parameters + OPTIONS.own_parameters, mask=given, other=-float("inf"))


@triton.jit
def blocks_of(keys, OPTIONS: tl.constexpr):
    """Number of cache blocks that hold the first `keys` keys of a sequence."""
    return (keys + OPTIONS.block_size - 1) // OPTIONS.block_size


@triton.jit
def cache_of(tensors, block_table, sequence, max_blocks, slots, begin, end, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """A walk's `cache`; `tensors` are the first four of it, `slots` those of all blocks, or of a contiguous head."""
    key_cache, value_cache, key_scale, value_scale = tensors
    if OPTIONS.contiguous:
        table = (sequence.to(tl.int64) * kv_heads + kv_head) * slots
    else:
        table = block_table + sequence.to(tl.int64) * max_blocks
    return key_cache, value_cache, key_scale, value_scale, table, begin, end, kv_head, kv_heads, slots


@triton.jit
def every_block_mapped(low, high, cache, OPTIONS: tl.constexpr):
    """Whether all keys in [low, high), by whole blocks, have a block: then loops need not ask for each of them."""
    highest = (low * 0).to(tl.uint32)  # unsigned, in which -1 is above every block
    behind = highest + 1
    if not OPTIONS.contiguous:
        _, _, _, _, table, _, _, _, _, slots = cache
        behind = (slots // OPTIONS.block_size).to(tl.uint32)
        blocks = blocks_of(high, OPTIONS)
        # A number and not a tensor goes round the loop: Triton gives up pipelining the loops whose bounds depend on it.
        for start in tl.range(low // OPTIONS.block_size, blocks, 1024):
            index = start + tl.arange(0, 1024)
            page = tl.load(table + index, mask=index < blocks, other=0)
            highest = tl.maximum(highest, tl.max(page.to(tl.uint32)))
    return highest < behind


@triton.jit
def visible_keys(low, high, mapped, row, cache, OPTIONS: tl.constexpr):
    """How many of the keys in [low, high) each row sees; unless all are `mapped`, by looking at every one's block."""
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
    """What the number n of keys that each row sees does: bias - power ln n of sigmoid, n^-power of relu.

    It takes the place of the row's b. The row and the cache are those of all keys, not of a part.
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
    """Block of every key of the tile at `start`, -1 for none; by whole blocks, so that loads of keys stay vectors.

    The host cannot see the table: a number that is no block of the cache is none.

    A block is looked up once and not once for each of its keys: in prefill the registers that this takes made the
    assembler wait for every single matrix product. Contiguous keys are all of block 0, as far as there are any.
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
    """Keys [head_width, keys], and of a cache with scales theirs [keys].

    A block's panel is [head_dim, block_size], contiguous keys are [keys, head_dim].
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
    """Values [keys, value_width] of the keys that are `used`, and of a cache with scales theirs [keys].

    What no row sees is not read, as it may be NaN.
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
    """Numbers of a cache as operands of matrix products; those of 8 bits are exact there. uint8 is e4m3."""
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
    elif INTERPRETED:  # which would take the integer for a bfloat16's bits
        result = numbers.to(tl.float32).to(ELEMENT)
    elif tl.bfloat16 == ELEMENT:
        result = tl.inline_asm_elementwise(BFLOAT16, "=r,=r,r", [numbers], tl.bfloat16, is_pure=False, pack=4)
    else:
        result = tl.inline_asm_elementwise(FLOAT16, "=r,=r,r", [numbers], tl.float16, is_pure=False, pack=4)
    return result


@triton.jit
def block_scale(scale, page, cache, MAPPED: tl.constexpr):
    """What the numbers of every key's block are multiplied by, float32 [keys]; 0 where there is no block."""
    _, _, _, _, _, _, _, kv_head, kv_heads, _ = cache
    pointers = scale + page.to(tl.int64) * kv_heads + kv_head
    return tl.load(pointers) if MAPPED else tl.load(pointers, mask=page >= 0, other=0.0)
