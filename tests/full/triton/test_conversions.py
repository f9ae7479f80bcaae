"""The inline assembly that turns bytes into numbers of 16 bits, run by PTX's definition of its instructions."""

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from sharp.plugins.triton.e4m3 import BFLOAT16_OF_E4M3, FLOAT16_OF_E4M3
from sharp.plugins.triton.screen_interval import BFLOAT16, FLOAT16

U32 = np.uint32
Lanes = Callable[..., np.ndarray]


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Return four of the eight bytes of a and b, as the selector's nibbles say.

    A nibble of 8 or more chooses a byte's sign, eight times.
    """
    found = np.zeros_like(a)
    for place in range(4):
        nibble = int(selector[0]) >> 4 * place & 15
        byte = (a, b)[nibble % 8 >= 4] >> U32(8 * (nibble % 4)) & U32(255)
        found |= (byte if nibble < 8 else (byte >> U32(7)) * U32(255)) << U32(8 * place)
    return found


def by_lanes(dtype: np.dtype, function: Lanes) -> Lanes:
    """Return a function of words that applies `function` to their two numbers of 16 bits."""
    return lambda *words: np.ascontiguousarray(function(*(word.view(dtype) for word in words)).astype(dtype)).view(U32)


INSTRUCTIONS: dict[str, Lanes] = {
    "mov.b32": lambda a: a,
    "prmt.b32": prmt,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "shr.u32": lambda a, by: a >> by,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if table[0] == 0xEA else a * 0,
    "sub.f16x2": by_lanes(np.dtype(np.float16), lambda a, b: a - b),
    "fma.rn.f16x2": by_lanes(np.dtype(np.float16), lambda a, b, c: a * b + c),  # the product is exact for these numbers
    "fma.rn.bf16x2": by_lanes(
        np.dtype(ml_dtypes.bfloat16), lambda a, b, c: a.astype(np.float32) * b.astype(np.float32) + c.astype(np.float32)
    ),
}


@pytest.mark.parametrize(("assembly", "dtype"), [(BFLOAT16, ml_dtypes.bfloat16), (FLOAT16, np.float16)])
def test_every_byte_becomes_its_number(assembly: object, dtype: type) -> None:
    # Two words with every byte at every place, in a different order at each.
    bytes_ = np.stack([np.roll(np.arange(-128, 128), 37 * place).astype(np.int8) for place in range(8)], 1)
    words = [np.ascontiguousarray(part).view(U32)[:, 0] for part in (bytes_[:, :4], bytes_[:, 4:])]
    held = {"$4": words[0], "$5": words[1]}
    execute(assembly, held)
    for place in range(4):
        found = held[f"${place}"].view(dtype).reshape(256, 2).astype(np.float32)
        np.testing.assert_array_equal(found, bytes_[:, [place, place + 4]].astype(np.float32))


@pytest.mark.parametrize(("assembly", "dtype"), [(BFLOAT16_OF_E4M3, ml_dtypes.bfloat16), (FLOAT16_OF_E4M3, np.float16)])
def test_every_byte_of_e4m3_becomes_its_number(assembly: object, dtype: type) -> None:
    bytes_ = np.stack([np.roll(np.arange(256), 37 * place).astype(np.uint8) for place in range(4)], 1)
    held = {"$2": np.ascontiguousarray(bytes_).view(U32)[:, 0]}
    execute(assembly, held)
    found = np.concatenate([held[f"${place}"].view(dtype).reshape(256, 2) for place in range(2)], 1)
    np.testing.assert_array_equal(found.astype(np.float32), bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def execute(assembly: object, held: dict[str, np.ndarray]) -> None:
    """Run a block of instructions on registers, and store the results in them."""
    text: str = getattr(assembly, "value", assembly)
    for line in text.strip("{}\n").replace("\n", "").split(";"):
        if not line or line.startswith(".reg"):
            continue
        name, operands = line.split(" ", 1)
        to, *given = re.split(r",\s*", operands)
        values = [held[operand] if operand in held else np.full(256, int(operand, 0), U32) for operand in given]
        held[to] = INSTRUCTIONS[name](*values)
