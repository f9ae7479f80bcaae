"""8-bit floats of the type e4m3, converted bit by bit, because only GPUs from 8.9 on have instructions for them.

Rounding is that of `sharp.plugins.op.e4m3`. 0x7f and 0xff are NaN when read, and never written.
"""

import triton
import triton.language as tl

# Four e4m3 bytes become four 16-bit floats. The seven bits of exponent and mantissa are moved to the place of exponent
# and mantissa in the 16-bit float, which is then multiplied by 2 to the difference of the biases: 2^120 in bfloat16,
# 2^8 in float16. Subnormal numbers come out right. A NaN (all ones) is added if all seven bits are ones. The code is
# declared impure for the reason given in `loads.py`.
BFLOAT16_OF_E4M3 = tl.constexpr("""{
.reg .b32 size, above, power, low, high, nan, bits;
mov.b32 power, 0x7B807B80;
and.b32 size, $2, 0x7F7F7F7F;
add.u32 above, size, 0x01010101;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 nan, above, 0, 0x9988;
shr.u32 bits, low, 4;
and.b32 bits, bits, 0x07F007F0;
lop3.b32 bits, low, 0x80008000, bits, 0xEA;
fma.rn.bf16x2 $0, bits, power, nan;
prmt.b32 high, $2, 0, 0x3424;
prmt.b32 nan, above, 0, 0xBBAA;
shr.u32 bits, high, 4;
and.b32 bits, bits, 0x07F007F0;
lop3.b32 bits, high, 0x80008000, bits, 0xEA;
fma.rn.bf16x2 $1, bits, power, nan;
}""")
FLOAT16_OF_E4M3 = tl.constexpr("""{
.reg .b32 size, above, power, low, high, nan, bits;
mov.b32 power, 0x5C005C00;
and.b32 size, $2, 0x7F7F7F7F;
add.u32 above, size, 0x01010101;
prmt.b32 low, $2, 0, 0x1404;
prmt.b32 nan, above, 0, 0x9988;
shr.u32 bits, low, 1;
and.b32 bits, bits, 0x3F803F80;
lop3.b32 bits, low, 0x80008000, bits, 0xEA;
fma.rn.f16x2 $0, bits, power, nan;
prmt.b32 high, $2, 0, 0x3424;
prmt.b32 nan, above, 0, 0xBBAA;
shr.u32 bits, high, 1;
and.b32 bits, bits, 0x3F803F80;
lop3.b32 bits, high, 0x80008000, bits, 0xEA;
fma.rn.f16x2 $1, bits, power, nan;
}""")


@triton.jit
def decoded(codes):
    """Return the numbers of e4m3 bytes, given as int32, as float32."""
    size = codes & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    magnitude = tl.where(size == 0x7F, float("nan"), magnitude)
    # The sign is set as a bit, because Triton's minus turns 0 into 0 instead of -0.
    return (magnitude.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encoded(numbers):
    """Return the bytes, as int32, of the nearest e4m3 numbers, ties to even; +-448 beyond +-448, 0 for NaN."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bounded = tl.minimum(size, 0x43E00000)  # 448
    normal = (bounded - (120 << 23) + 0x7FFFF + ((bounded >> 20) & 1)) >> 20
    # Adding 2^14 rounds to multiples of 2^-9, because the last bit of a float32 next to 2^14 is worth that.
    shifted = bounded.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bounded < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0, code)


@triton.jit
def scale_of(largest):
    """Return the power of two, at least 2^-126, that brings `largest` >= 0 below 256 by division.

    The result is 0 for 0, and NaN if `largest` is not finite.
    """
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest == 0, 0.0, tl.maximum(power * 0.0078125, 1.1754943508222875e-38))
    return tl.where(largest < float("inf"), scale, float("nan"))
