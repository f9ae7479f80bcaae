"""Kernels that are wrong on a GPU, though the interpreter, which runs all in order, computes the right numbers."""

import torch
import triton
import triton.language as tl

from tests.full.triton.interpreted import MEMORY
from tests.full.triton.memory_check import place_of


@triton.jit
def kernel(numbers, FAULT: tl.constexpr):
    """Add 1 to ten numbers in each of the programs 0 and 1, with the fault FAULT."""
    own = tl.program_id(0) * 10 + tl.arange(0, 16)
    inside = tl.arange(0, 16) < 10
    if FAULT == "beside":
        tl.store(numbers + own, 1, mask=own >= 0)
    elif FAULT == "both write":
        tl.store(numbers + tl.arange(0, 16), tl.program_id(0) + 1, mask=inside)
    elif FAULT == "one reads what the other writes":
        others = (own + 10) % 20
        found = tl.load(numbers + others, mask=inside)
        tl.debug_barrier()
        tl.store(numbers + own, found + 1, mask=inside)
    elif FAULT == "no barrier before the write":
        tl.store(numbers + own, tl.load(numbers + own, mask=inside) + 1, mask=inside)
    elif FAULT == "no barrier before the read":
        tl.store(numbers + own, 1, mask=inside)
        tl.store(numbers + own + 20, tl.load(numbers + own, mask=inside), mask=inside)
    elif FAULT == "two values":
        tl.store(numbers + tl.program_id(0) * 10 + own * 0, own, mask=inside)
    else:
        found = tl.load(numbers + own, mask=inside)
        tl.debug_barrier()
        tl.store(numbers + own, found + 1, mask=inside)
        tl.store(numbers + 20 + own * 0, 1, mask=inside)  # any program may write last, because all write 1


def run(fault: str) -> list[int]:
    """Return the 40 numbers, at first 0, after the kernel with a fault."""
    numbers = torch.zeros(40, dtype=torch.int32)
    with MEMORY.watched([place_of(numbers[:25] if fault == "beside" else numbers)]):
        kernel[(2,)](numbers, FAULT=fault)
    return numbers.tolist()
