"""Large arrays of zeros in the pages that the processor reads fastest."""

import contextlib
import mmap
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray


def zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Zeros at the start of a page, in pages of 2 MB where the system has them (Linux: transparent huge pages).

    A kernel's vectors then cross no cache line, and one entry of the processor's page table covers 512 times as much.
    Memory that is never written is never taken from the system, but for the rest of a page.

    Raises:
        MemoryError: the system has no such range of addresses.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {size >> 20} MiB of memory: {error}") from error
    with contextlib.suppress(OSError, AttributeError):  # a system without such pages has ordinary ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, prod(shape)).reshape(shape)
