"""Intervals of logits from the key screen, for `screen.py`.

Rounding. Sums of matrix products are off by at most 2^-22 of the partial sums, because matrix units may truncate where
other arithmetic rounds. So rho = (head_dim + 32) 2^-22 bounds the error of q.k in the kernel that reads every key, and
of q.n. With N = 127 sqrt(head_dim) and a query's remainder of at most epsilon |q| (0 for 16-bit types), a logit before
soft cap and bias differs by less than w from z = q.c + s q.n,

    w = |q| (d (1 + rho) + s N (2 rho + epsilon) + 2 rho |c|) + 2^-100 (1 + s + d).

The factors of d, s and 1 are rounded up by 4 rho, because |q| and |c| are float32 sums of head_dim squares.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import INTERPRETED, in_bfloat16
from sharp.plugins.triton.walk import tanh

# The bytes of two words become four pairs of 16-bit floats: one pair of the first byte of each word, one of the second,
# and so on. The conversion is that of `loads.py`.
PAIRS = """
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $4, $5, 0x7362;
"""
BFLOAT16 = tl.constexpr(
    "{\n.reg .b32 low, high, number, bits, sign, one;\nmov.b32 one, 0xBF80BF80;"
    + PAIRS
    + "".join(
        f"""prmt.b32 number, {half}, 0, {select};
lop3.b32 bits, number, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, number, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 ${result}, sign, one, bits;
"""
        for result, (half, select) in enumerate(
            (("low", "0x4140"), ("low", "0x4342"), ("high", "0x4140"), ("high", "0x4342"))
        )
    )
    + "}"
)
FLOAT16 = tl.constexpr(
    "{\n.reg .b32 low, high, number, magic;\nmov.b32 magic, 0x64806480;"
    + PAIRS
    + "xor.b32 low, low, 0x80808080;\nxor.b32 high, high, 0x80808080;\n"
    + "".join(
        f"""prmt.b32 number, {half}, 0x64646464, {select};
sub.f16x2 ${result}, number, magic;
"""
        for result, (half, select) in enumerate(
            (("low", "0x4140"), ("low", "0x4342"), ("high", "0x4140"), ("high", "0x4342"))
        )
    )
    + "}"
)


@triton.jit
def load_quarter(numbers, offsets, exists, PLACE: tl.constexpr, OPTIONS: tl.constexpr):
    """Return the channels 4 i + PLACE of the vectors at `offsets` [rows], float32 [rows, quad_width].

    Channels behind the last, and rows that do not `exist`, are 0.
    """
    channels = 4 * tl.arange(0, OPTIONS.quad_width) + PLACE
    inside = exists[:, None] & (channels < OPTIONS.head_dim)[None, :]
    return tl.load(numbers + offsets[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_quarters(numbers, offsets, exists, OPTIONS: tl.constexpr):
    """Return the vectors at `offsets` [rows] as four tensors [rows, quad_width]; the i-th has the channels 4 j + i.

    A word of the screen holds four channels.
    """
    return (
        load_quarter(numbers, offsets, exists, 0, OPTIONS),
        load_quarter(numbers, offsets, exists, 1, OPTIONS),
        load_quarter(numbers, offsets, exists, 2, OPTIONS),
        load_quarter(numbers, offsets, exists, 3, OPTIONS),
    )


@triton.jit
def products(left, right):
    """Return the scalar products [rows] of vectors that are given as four quarters each (`load_quarters`)."""
    total = tl.sum(left[0] * right[0], 1)
    for place in tl.static_range(1, 4):
        total += tl.sum(left[place] * right[place], 1)
    return total


@triton.jit
def length(quarters):
    """Return at least the length of vectors in four quarters, up to rounding of sums, [rows]; never below 2^-90.

    The result is NaN or infinity if a component is not finite.
    """
    largest = tl.max(tl.abs(quarters[0]), 1)
    for place in tl.static_range(1, 4):
        largest = tl.maximum(largest, tl.max(tl.abs(quarters[place]), 1))
    unit = tl.where(largest >= 2.0**-100, largest, 1.0)  # squares of small numbers would be 0
    square = tl.sum(quarters[0] * 0.0, 1)
    for place in tl.static_range(0, 4):
        share = quarters[place] / unit[:, None]
        square += tl.sum(share * share, 1)
    found = unit * tl.sqrt(square)
    return tl.where(found < 2.0**-90, 2.0**-90, found)


@triton.jit
def multiplied(numbers, known, OPTIONS: tl.constexpr):
    """Return a quarter of the queries as parts for products with integers; zeros for queries that are not `known`."""
    numbers = tl.where(known[:, None], numbers, 0.0)
    PARTS: tl.constexpr = OPTIONS.screen_parts
    return in_bfloat16(numbers, PARTS) if PARTS > 1 else (numbers.to(OPTIONS.screen_element),)


@triton.jit
def bounded_rows(query, key_shift, numbers, exists, slope, kv_head, shifted, scale, OPTIONS: tl.constexpr):
    """Return query rows (by number) as four quarters in parts, q.c times the scale, and w's factors of d, s and 1.

    A key of a screen is c + s n + r with |r| <= d: c is the head's `key_shift`, n are integers, s is the key's scale, d
    its distance. Its logit before soft cap and bias lies within w of scale (q.c + s q.n).

    The logits of a query that is not finite or very long, of a head with such a shift, or of a head with a huge slope
    have no bounds. Their factor of d is then infinite, and their parts, q.c and other factors are 0. `key_shift` is
    read if `shifted` is not 0.
    """
    RHO: tl.constexpr = (OPTIONS.head_dim + 32) * 2.0**-22
    UP: tl.constexpr = 1.0 + 4.0 * RHO
    quarters = load_quarters(query, numbers * OPTIONS.head_dim, exists, OPTIONS)
    head = tl.zeros([1], tl.int32) + kv_head
    shift = load_quarters(key_shift, head * OPTIONS.head_dim, (head * 0 + shifted) != 0, OPTIONS)
    size, shift_size = length(quarters), length(shift)
    bounded = (size * tl.maximum(scale, 1.0) < 2.0**60) & (shift_size < 2.0**60) & (tl.abs(slope) < 2.0**60)
    size = size * scale * UP
    least = 2.0**-100 * tl.maximum(scale, 1.0)
    of_distance = tl.where(bounded, size * (1.0 + RHO) + least, float("inf"))
    of_scale = tl.where(bounded, size * (OPTIONS.longest_integers * (2.0 * RHO + OPTIONS.screen_rest)) + least, 0.0)
    always = tl.where(bounded, size * shift_size * (2.0 * RHO * UP) + least, 0.0)
    constant = tl.where(bounded, products(quarters, shift) * scale, 0.0)
    parts = (
        multiplied(quarters[0], bounded, OPTIONS),
        multiplied(quarters[1], bounded, OPTIONS),
        multiplied(quarters[2], bounded, OPTIONS),
        multiplied(quarters[3], bounded, OPTIONS),
    )
    return parts, constant, of_distance, of_scale, always


@triton.jit
def places_of(start, page, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """Return the offsets in a screen, int64 [keys] in words, of the first word of each key of the tile at `start`.

    `page` [keys] are the keys' blocks. A key's further words follow at a stride of block_size.
    """
    WORDS: tl.constexpr = (OPTIONS.quads + 2) * OPTIONS.block_size
    index = tl.arange(0, OPTIONS.keys)
    return (page.to(tl.int64) * kv_heads + kv_head) * WORDS + (start + index) % OPTIONS.block_size


@triton.jit
def load_bounds(start, page, key_screen, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """Return scales and distances [keys] of the tile at `start`; 0 and infinity if nothing is known of a key.

    `page` [keys] are the keys' blocks; nothing is known of keys without a block (negative).
    """
    behind = key_screen + places_of(start, page, kv_head, kv_heads, OPTIONS) + OPTIONS.quads * OPTIONS.block_size
    # Scale and distance are loaded as a pair, so that one thread loads both for a key.
    both = behind[:, None] + OPTIONS.block_size * tl.arange(0, 2)[None, :]
    mapped = (page >= 0)[:, None] & (tl.arange(0, 2) >= 0)[None, :]
    scales, distances = tl.split(tl.load(both, mask=mapped, other=0).to(tl.float32, bitcast=True))
    return scales, tl.where(distances == 0, float("inf"), distances)


@triton.jit
def load_words(start, page, key_screen, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """Return the integers of the tile at `start`, int32 [quad_width, keys]: four integers of 8 bits per word.

    Words of keys without a block (`page` negative), and words behind the last, are 0.
    """
    quads = tl.arange(0, OPTIONS.quad_width)
    inside = (page >= 0)[None, :]
    if OPTIONS.quad_width != OPTIONS.quads:
        inside = inside & (quads < OPTIONS.quads)[:, None]
    words = key_screen + places_of(start, page, kv_head, kv_heads, OPTIONS)
    return tl.load(words[None, :] + quads[:, None] * OPTIONS.block_size, mask=inside, other=0)


@triton.jit
def integers_of(words, OPTIONS: tl.constexpr):
    """Return the four signed bytes of words, lowest first, as four tensors of `OPTIONS.screen_element`, exactly."""
    ELEMENT: tl.constexpr = OPTIONS.screen_element
    if INTERPRETED:
        result = (
            ((words << 24) >> 24).to(tl.float32).to(ELEMENT),
            ((words << 16) >> 24).to(tl.float32).to(ELEMENT),
            ((words << 8) >> 24).to(tl.float32).to(ELEMENT),
            (words >> 24).to(tl.float32).to(ELEMENT),
        )
    elif tl.bfloat16 == ELEMENT:
        BFLOATS: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        result = tl.inline_asm_elementwise(BFLOAT16, "=r,=r,=r,=r,r,r", [words], BFLOATS, is_pure=True, pack=2)
    else:
        HALVES: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        result = tl.inline_asm_elementwise(FLOAT16, "=r,=r,=r,=r,r,r", [words], HALVES, is_pure=True, pack=2)
    return result


@triton.jit
def screen_products(parts, words, OPTIONS: tl.constexpr):
    """Return q.n, float32 [rows, keys], of queries q in `parts` (`bounded_rows`) and integers n in `words` of keys."""
    integers = integers_of(words, OPTIONS)
    total = tl.full([OPTIONS.rows, OPTIONS.keys], 0, tl.float32)
    PARTS: tl.constexpr = OPTIONS.screen_parts
    for place in tl.static_range(0, 4):
        for part in tl.static_range(0, PARTS):
            total = tl.dot(parts[place][part], integers[place], total)
    return total


@triton.jit
def position_bias(start, row, OPTIONS: tl.constexpr):
    """Return the ALiBi bias that is subtracted from the logits [rows, keys]."""
    position, _, _, slope, _, _ = row
    keys = start + tl.arange(0, OPTIONS.keys)
    return slope[:, None] * tl.abs(keys[None, :] - position[:, None]).to(tl.float32)


@triton.jit
def interval(start, lower, upper, row, softcap, OPTIONS: tl.constexpr):
    """Return both ends of logits [rows, keys] after soft cap and position bias, from the ends before, with margins.

    `start` is the tile's first key, `row` that of a walk.
    """
    if OPTIONS.softcap:
        # The margin covers `tanh`, which is off by a few units in the last place. Infinite ends stay infinite,
        # because a logit that may be NaN has no bounds.
        margin = softcap * 2.0**-18
        lower = tl.where(lower > -float("inf"), softcap * tanh(lower / softcap) - margin, lower)
        upper = tl.where(upper < float("inf"), softcap * tanh(upper / softcap) + margin, upper)
    if OPTIONS.alibi:
        bias = position_bias(start, row, OPTIONS)
        margin = tl.abs(bias) * 2.0**-20
        lower, upper = lower - (bias + margin), upper - (bias - margin)
    return lower, upper
