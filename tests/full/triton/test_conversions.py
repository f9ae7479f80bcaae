"""The inline assembly that turns bytes of a key screen into numbers of 16 bits, by what PTX says of instructions."""

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from sharp.plugins.triton.screen_interval import BFLOAT16, FLOAT16

U32 = np.uint32
Lanes = Callable[..., np.ndarray]


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four bytes of the eight of a and b, as the selector's nibbles say."""
    found = np.zeros_like(a)
    for place in range(4):
        nibble = int(selector[0]) >> 4 * place & 7
        found |= ((a, b)[nibble >= 4] >> U32(8 * (nibble % 4)) & U32(255)) << U32(8 * place)
    return found


def by_lanes(dtype: np.dtype, function: Lanes) -> Lanes:
    """The function of numbers of 16 bits, two in a word."""
    return lambda *words: np.ascontiguousarray(function(*(word.view(dtype) for word in words)).astype(dtype)).view(U32)


INSTRUCTIONS: dict[str, Lanes] = {
    "mov.b32": lambda a: a,
    "prmt.b32": prmt,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table[0] == 0xEA else a * 0,
    "sub.f16x2": by_lanes(np.dtype(np.float16), lambda a, b: a - b),
    "fma.rn.bf16x2": by_lanes(
        np.dtype(ml_dtypes.bfloat16), lambda a, b, c: a.astype(np.float32) * b.astype(np.float32) + c.astype(np.float32)
    ),
}


@pytest.mark.parametrize(("assembly", "dtype"), [(BFLOAT16, ml_dtypes.bfloat16), (FLOAT16, np.float16)])
def test_every_byte_becomes_its_number(assembly: object, dtype: type) -> None:
    # Two words of all bytes at every place, in another order each.
    bytes_ = np.stack([np.roll(np.arange(-128, 128), 37 * place).astype(np.int8) for place in range(8)], 1)
    words = [np.ascontiguousarray(part).view(U32)[:, 0] for part in (bytes_[:, :4], bytes_[:, 4:])]
    held = {"$4": words[0], "$5": words[1]}
    text: str = getattr(assembly, "value", assembly)
    for line in text.strip("{}\n").replace("\n", "").split(";"):
        if not line or line.startswith(".reg"):
            continue
        name, operands = line.split(" ", 1)
        to, *given = re.split(r",\s*", operands)
        values = [held[one] if one in held else np.full(256, int(one, 0), U32) for one in given]
        held[to] = INSTRUCTIONS[name](*values)
    for place in range(4):
        found = held[f"${place}"].view(dtype).reshape(256, 2).astype(np.float32)
        np.testing.assert_array_equal(found, bytes_[:, [place, place + 4]].astype(np.float32))
