"""Arithmetic in fewer instructions than Triton's own, and of numbers that may be infinite."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def finite_or_zero(peak):
    """What may be subtracted: before the first finite logit the maximum is -inf, and -inf - -inf is NaN."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def log2(x):
    """To 2^-22 in one instruction, for whole tiles: `tl.log2` takes 25, and takes a subnormal number for 0."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def log2_above_one(x):
    """As `log2` for x >= 1, which is never subnormal: without the three instructions that look for that."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def exp2(x):
    """2^x to 2^-22 in one instruction: `tl.exp2` takes four, for results that are subnormal, which are 0 here."""
    if INTERPRETED:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def reciprocal(x):
    """1 / x in one instruction and to 2^-22; of a subnormal number infinity."""
    if INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def in_bfloat16(numbers, PARTS: tl.constexpr):
    """Float32 numbers as a sum of one to three of bfloat16, each the rounding of what those before it left."""
    first = numbers.to(tl.bfloat16)
    if PARTS == 1:
        return (first,)
    elif PARTS == 2:  # noqa: RET505 - Triton 3.6 wants returns behind each other to be of one type
        return first, left_over(numbers, first).to(tl.bfloat16)
    else:
        rest = left_over(numbers, first)
        second = rest.to(tl.bfloat16)
        return first, second, left_over(rest, second).to(tl.bfloat16)


@triton.jit
def left_over(numbers, part):
    """What a part leaves of float32 numbers; of an infinite one nothing, and not NaN."""
    rest = numbers - part.to(tl.float32)
    return tl.where(rest == rest, rest, 0.0)
