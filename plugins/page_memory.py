"""Memory in the pages that the processor reads fastest: those of 2 MB, where the system has them."""

import contextlib
import ctypes
import mmap
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1; Python's mmap does not name it
MAPPINGS = Path("/proc/self/maps")
ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *(?:\[heap\])?$", re.MULTILINE)

# The first address and the one after the last.
Range = tuple[int, int]


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


@contextlib.contextmanager
def into_huge_pages() -> Iterator[None]:
    """Move what the process allocates in here, in whatever library, into pages of 2 MB when it is left without error.

    A decode step reads all weights of a model once, and waits less for them then: SmolLM2's took 3 to 10 % less time.
    Linux copies about 1 GB a second to do it; an older one than 6.1, or another system, leaves the memory as it is.
    """
    before = _anonymous()
    yield
    if not before:
        return
    madvise = ctypes.CDLL(None).madvise
    for begin, end in _new(before, _anonymous()):
        begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if begin < end:  # what the kernel says no to stays in small pages, which is no error
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def _anonymous() -> list[Range]:
    """What memory of no file the process has and can write, in order; nothing where the system does not tell."""
    try:
        text = MAPPINGS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [(int(begin, 16), int(end, 16)) for begin, end in ANONYMOUS.findall(text)]


def _new(before: list[Range], after: list[Range]) -> Iterator[Range]:
    """The parts of `after` that are not in `before`."""
    for begin, end in sorted({*after} - {*before}):  # most are the same, and there may be thousands
        for old_begin, old_end in before:
            if old_end > begin and old_begin < end:
                if old_begin > begin:
                    yield begin, old_begin
                begin = min(old_end, end)
        if begin < end:
            yield begin, end
