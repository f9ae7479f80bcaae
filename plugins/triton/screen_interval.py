"""Intervals of logits from the key screen, for `screen.py`.

Rounding. Sums of matrix products are off by 2^-22 of what is summed up at most, as matrix units may cut off where
arithmetic rounds: rho = (head_dim + 32) 2^-22 for q.k of the kernel that reads every key, and the same for q.n. With
N = 127 sqrt(head_dim) and a query's remainder of at most epsilon |q| (0 in 16 bits), a logit before soft cap and bias
is less than w from z = q.c + s q.n,

    w = |q| (d (1 + rho) + s N (2 rho + epsilon) + 2 rho |c|) + 2^-100 (1 + s + d).

The factors of d, s and 1 are rounded up by 4 rho: |q| and |c| are sums of head_dim squares in float32.
"""

import triton
import triton.language as tl

from sharp.plugins.triton.arithmetic import INTERPRETED, in_bfloat16
from sharp.plugins.triton.walk import tanh

# The bytes of two words as four pairs of numbers in 16 bits: those of the first byte of each word, of the second, and
# so on, as `loads.py` converts integers.
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
    """One of four channels of every quad, float32 [rows, quad_width]; zeros behind the last channel."""
    channels = 4 * tl.arange(0, OPTIONS.quad_width) + PLACE
    inside = exists[:, None] & (channels < OPTIONS.head_dim)[None, :]
    return tl.load(numbers + offsets[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_quarters(numbers, offsets, exists, OPTIONS: tl.constexpr):
    """The numbers at `offsets` as four tensors: a word of the screen has the integers of four channels."""
    return (
        load_quarter(numbers, offsets, exists, 0, OPTIONS),
        load_quarter(numbers, offsets, exists, 1, OPTIONS),
        load_quarter(numbers, offsets, exists, 2, OPTIONS),
        load_quarter(numbers, offsets, exists, 3, OPTIONS),
    )


@triton.jit
def products(left, right):
    """Sums of left * right over the quarters."""
    total = tl.sum(left[0] * right[0], 1)
    for place in tl.static_range(1, 4):
        total += tl.sum(left[place] * right[place], 1)
    return total


@triton.jit
def length(quarters):
    """At least the length of vectors, but for the roundings of sums; NaN or infinity of what is no vector."""
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
    """A quarter of the queries as parts of what integers are multiplied with; zeros of what is not `known`."""
    numbers = tl.where(known[:, None], numbers, 0.0)
    PARTS: tl.constexpr = OPTIONS.screen_parts
    return in_bfloat16(numbers, PARTS) if PARTS > 1 else (numbers.to(OPTIONS.screen_element),)


@triton.jit
def bounded_rows(query, key_shift, numbers, exists, slope, kv_head, shifted, scale, OPTIONS: tl.constexpr):
    """Of query rows, by their number: four quarters in parts, q.c times the scale, and w's factors of d, s and 1.

    Nothing bounds the logits of a query that is no number or very long: its factor of d is infinite.
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
    """Where the words of a tile's keys begin in a screen (int64)."""
    WORDS: tl.constexpr = (OPTIONS.quads + 2) * OPTIONS.block_size
    index = tl.arange(0, OPTIONS.keys)
    return (page.to(tl.int64) * kv_heads + kv_head) * WORDS + (start + index) % OPTIONS.block_size


@triton.jit
def load_bounds(start, page, key_screen, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """Scales and distances [keys] of a tile; 0 and infinite where nothing is known of a key."""
    behind = key_screen + places_of(start, page, kv_head, kv_heads, OPTIONS) + OPTIONS.quads * OPTIONS.block_size
    # As pairs, so that each key's are loaded by one thread.
    both = behind[:, None] + OPTIONS.block_size * tl.arange(0, 2)[None, :]
    mapped = (page >= 0)[:, None] & (tl.arange(0, 2) >= 0)[None, :]
    scales, distances = tl.split(tl.load(both, mask=mapped, other=0).to(tl.float32, bitcast=True))
    return scales, tl.where(distances == 0, float("inf"), distances)


@triton.jit
def load_words(start, page, key_screen, kv_head, kv_heads, OPTIONS: tl.constexpr):
    """The integers of a tile, int32 [quad_width, keys]: four of 8 bits each."""
    quads = tl.arange(0, OPTIONS.quad_width)
    inside = (page >= 0)[None, :]
    if OPTIONS.quad_width != OPTIONS.quads:
        inside = inside & (quads < OPTIONS.quads)[:, None]
    words = key_screen + places_of(start, page, kv_head, kv_heads, OPTIONS)
    return tl.load(words[None, :] + quads[:, None] * OPTIONS.block_size, mask=inside, other=0)


@triton.jit
def integers_of(words, OPTIONS: tl.constexpr):
    """Words as the numbers of their four bytes, exact in 16 bits."""
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
    """q.n of rows and keys, [rows, keys]."""
    integers = integers_of(words, OPTIONS)
    total = tl.full([OPTIONS.rows, OPTIONS.keys], 0, tl.float32)
    PARTS: tl.constexpr = OPTIONS.screen_parts
    for place in tl.static_range(0, 4):
        for part in tl.static_range(0, PARTS):
            total = tl.dot(parts[place][part], integers[place], total)
    return total


@triton.jit
def position_bias(start, row, OPTIONS: tl.constexpr):
    """What ALiBi takes off the logits [rows, keys]."""
    position, _, _, slope, _, _ = row
    keys = start + tl.arange(0, OPTIONS.keys)
    return slope[:, None] * tl.abs(keys[None, :] - position[:, None]).to(tl.float32)


@triton.jit
def interval(start, lower, upper, row, softcap, OPTIONS: tl.constexpr):
    """Both ends of logits [rows, keys] after soft cap and position bias."""
    if OPTIONS.softcap:
        # `tanh` is off by a few units in the last place. Nothing bounds a logit that may be NaN.
        margin = softcap * 2.0**-18
        lower = tl.where(lower > -float("inf"), softcap * tanh(lower / softcap) - margin, lower)
        upper = tl.where(upper < float("inf"), softcap * tanh(upper / softcap) + margin, upper)
    if OPTIONS.alibi:
        bias = position_bias(start, row, OPTIONS)
        margin = tl.abs(bias) * 2.0**-20
        lower, upper = lower - (bias + margin), upper - (bias - margin)
    return lower, upper
