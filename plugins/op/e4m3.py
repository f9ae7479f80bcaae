"""8-bit floats of the type e4m3 (ONNX's FLOAT8E4M3FN, torch.float8_e4m3fn) as bytes, because numpy has no such type.

A number has a sign, 4 bits of exponent with bias 7 and 3 bits of mantissa (Micikevicius et al. 2022, "FP8 Formats for
Deep Learning"). The magnitudes are 0, multiples of 2^-9 up to 2^-6, then 8 numbers for each power of two up to 448.
There is no infinity; 0x7f and 0xff are NaN.
"""

import numpy as np
from numpy.typing import NDArray

LARGEST = np.float32(448)
LEAST_SCALE = np.float32(2.0**-126)  # float32's least normal number; a processor may flush smaller ones to 0


def decode(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers that the bytes stand for, which float32 holds exactly; NaN for 0x7f and 0xff."""
    return _NUMBERS[stored]


def encode(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest e4m3 numbers as bytes, ties to even. Numbers beyond +-448, and infinities, become +-448.

    NaN becomes 0.
    """
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    magnitude = np.minimum(bits & 0x7FFFFFFF, LARGEST.view(np.uint32))
    # From 2^-6 on, numbers are normal: the exponent's bias falls by 120, and 3 of 23 bits of mantissa are kept.
    normal = (magnitude - (120 << 23) + 0x7FFFF + (magnitude >> 20 & 1)) >> 20
    # Below 2^-6, adding 2^14 rounds to multiples of 2^-9, because that is the last bit of a float32 next to 2^14.
    shifted = magnitude.view(np.float32) + np.float32(2**14)
    subnormal = shifted.view(np.uint32) - np.float32(2**14).view(np.uint32)
    code = np.where(magnitude.view(np.float32) < 2.0**-6, subnormal, normal) | (bits >> 24 & 0x80)
    return np.where(np.isnan(numbers), 0, code).astype(np.uint8)


def scale_of(largest: NDArray[np.float32] | np.float32) -> NDArray[np.float32]:
    """Return the power of two that brings numbers up to `largest` (>= 0) into [128, 256) by division.

    The power is at least 2^-126, so smaller numbers stay below 128. The result is 0 for 0, and NaN if `largest` is not
    finite.
    """
    largest = np.asarray(largest, np.float32)
    power = (largest.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    scale = np.where(largest == 0, np.float32(0), np.maximum(power * np.float32(2.0**-7), LEAST_SCALE))
    return np.where(np.isfinite(largest), scale, np.float32(np.nan))


def _number(byte: int) -> float:
    """Return the value of an fp8 byte: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; 0x7F and 0xFF are NaN."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if byte & 0x80 else magnitude


_NUMBERS = np.array([_number(byte) for byte in range(256)], np.float32)
