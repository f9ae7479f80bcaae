"""Numbers of 8 bits, e4m3 (ONNX's FLOAT8E4M3FN, torch.float8_e4m3fn), as bytes: numpy has no such type.

A sign, 4 bits of exponent with bias 7 and 3 of mantissa (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"):
0, multiples of 2^-9 up to 2^-6, then 8 numbers for each power of two up to 448. There is no infinity; 0x7f and 0xff are
NaN.
"""

import numpy as np
from numpy.typing import NDArray

LARGEST = np.float32(448)
LEAST_SCALE = np.float32(2.0**-126)  # float32's least normal number: a processor may take smaller ones for 0


def decode(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers of bytes, which float32 holds exactly."""
    return _NUMBERS[stored]


def encode(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest numbers, ties to even, as bytes; beyond 448 it is 448 with the sign. A NaN becomes 0, not NaN."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    magnitude = np.minimum(bits & 0x7FFFFFFF, LARGEST.view(np.uint32))
    # From 2^-6 on the exponent's bias falls by 120, and of 23 bits of mantissa 3 stay.
    normal = (magnitude - (120 << 23) + 0x7FFFF + (magnitude >> 20 & 1)) >> 20
    # Below, the last bit of a sum with 2^14 is worth 2^-9: the addition rounds.
    shifted = magnitude.view(np.float32) + np.float32(2**14)
    subnormal = shifted.view(np.uint32) - np.float32(2**14).view(np.uint32)
    code = np.where(magnitude.view(np.float32) < 2.0**-6, subnormal, normal) | (bits >> 24 & 0x80)
    return np.where(np.isnan(numbers), 0, code).astype(np.uint8)


def scale_of(largest: NDArray[np.float32] | np.float32) -> NDArray[np.float32]:
    """The power of two that brings numbers up to `largest` below 256; 0 for 0, NaN where one is not finite."""
    largest = np.asarray(largest, np.float32)
    power = (largest.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    scale = np.where(largest == 0, np.float32(0), np.maximum(power * np.float32(2.0**-7), LEAST_SCALE))
    return np.where(np.isfinite(largest), scale, np.float32(np.nan))


def _number(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if byte & 0x80 else magnitude


_NUMBERS = np.array([_number(byte) for byte in range(256)], np.float32)
