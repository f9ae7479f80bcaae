"""Numbers of 8 bits, e4m3, by their bits: only GPUs from 8.9 on have instructions for them.

Rounded as by `sharp.plugins.ops.e4m3`. 0x7f and 0xff are NaN when read, and never written.
"""

import triton
import triton.language as tl

# Four numbers by their bytes: exponent and mantissa seven bits wide where a number of 16 bits has them, times what its
# bias is larger by: 2^120 in bfloat16, 2^8 in float16. Subnormal numbers come out right. What is added is NaN, all bits
# of which are ones, where the seven bits are. Not pure, as in `loads.py`.
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
    """The numbers of bytes, which are int32 here, as float32."""
    size = codes & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    magnitude = tl.where(size == 0x7F, float("nan"), magnitude)
    # By its bit: Triton's minus makes 0 of 0.
    return (magnitude.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encoded(numbers):
    """The bytes, as int32, of the nearest numbers to float32 ones, ties to even; 448 beyond it, 0 for NaN."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bounded = tl.minimum(size, 0x43E00000)  # 448
    normal = (bounded - (120 << 23) + 0x7FFFF + ((bounded >> 20) & 1)) >> 20
    # The last bit of a sum with 2^14 is worth 2^-9: the addition rounds.
    shifted = bounded.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bounded < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0, code)


@triton.jit
def scale_of(largest):
    """The power of two that brings numbers up to `largest` below 256; 0 for 0, NaN for what is not finite."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest == 0, 0.0, tl.maximum(power * 0.0078125, 1.1754943508222875e-38))
    return tl.where(largest < float("inf"), scale, float("nan"))
