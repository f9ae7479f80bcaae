"""Arithmetic in fewer instructions than Triton's own, and on numbers that may be infinite."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def finite_or_zero(peak):
    """Return the peak, or 0 if it is -inf, so that -inf - peak is not NaN before the first finite logit."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def log2(x):
    """Return log2 x, accurate to 2^-22, in one instruction; `tl.log2` takes 25, and flushes a subnormal number to 0."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def log2_above_one(x):
    """Return log2 x for x >= 1, which is never subnormal, without the three instructions that check for that."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def exp2(x):
    """Return 2^x, accurate to 2^-22, in one instruction.

    Subnormal results are 0; `tl.exp2` takes four instructions for them.
    """
    if INTERPRETED:
        result = tl.exp2(x)
    else:
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def reciprocal(x):
    """Return 1 / x, accurate to 2^-22, in one instruction; infinity for a subnormal number."""
    if INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def in_bfloat16(numbers, PARTS: tl.constexpr):
    """Split float32 numbers into a tuple of PARTS (1 to 3) bfloat16 tensors, each the rounding of what is left."""
    first = numbers.to(tl.bfloat16)
    if PARTS == 1:
        return (first,)
    elif PARTS == 2:  # noqa: RET505 - Triton 3.6 wants consecutive returns to be of one type
        return first, left_over(numbers, first).to(tl.bfloat16)
    else:
        rest = left_over(numbers, first)
        second = rest.to(tl.bfloat16)
        return first, second, left_over(rest, second).to(tl.bfloat16)


@triton.jit
def left_over(numbers, part):
    """Return the remainder of float32 numbers after subtracting their bfloat16 part; 0 (not NaN) for infinities."""
    rest = numbers - part.to(tl.float32)
    return tl.where(rest == rest, rest, 0.0)
