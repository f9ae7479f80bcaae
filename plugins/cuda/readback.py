"""`Readback`: rows of a tensor on a GPU in page-locked memory of the host, which the GPU writes without a detour."""

import ctypes
import logging
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cuda.device import Driver
from sharp.plugins.errors import SharpError

logger = logging.getLogger(__name__)

PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked for every context
FLOAT_BYTES = 4


class Readback:
    """Memory for rows of float32, kept from step to step."""

    def __init__(self, columns: int, number: int) -> None:
        """For rows of so many numbers, of the GPU of that number."""
        self._columns = columns
        self._driver = Driver(number)
        self._memory = np.empty((0, columns), np.float32)

    def rows(self, count: int) -> NDArray[np.float32]:
        """Memory for so many rows, float32 [rows, columns]; what it held before is void."""
        if len(self._memory) < count:
            self._memory = _memory(self._driver, count, self._columns)
        return self._memory[:count]

    def forget(self) -> None:
        """Give the memory back."""
        self._memory = self._memory[:0].copy()

    def copy(self, address: int, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of a tensor at an address of the GPU, those of `indices` and no others; neighbours take one copy.

        Raises:
            SharpError: the driver refused it.
        """
        found = self.rows(len(indices))
        starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)  # of runs of neighbours, a copy each
        with self._driver.context() as call:
            for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(indices)], strict=True):
                source = address + int(indices[start]) * self._columns * FLOAT_BYTES
                part = found[start:end]
                call("cuMemcpyDtoH_v2", part.ctypes, ctypes.c_uint64(source), ctypes.c_size_t(part.nbytes))
        return found


def _memory(driver: Driver, rows: int, columns: int) -> NDArray[np.float32]:
    """Page-locked memory, or where the system has none other memory: copies are slower then, and the same."""
    try:
        return page_locked(driver, rows, columns)
    except SharpError as error:
        logger.warning("logits are copied through memory that is not page-locked, which is slower: %s", error)
        return np.empty((rows, columns), np.float32)


def page_locked(driver: Driver, rows: int, columns: int) -> NDArray[np.float32]:
    """Page-locked memory, float32 [rows, columns]; a GPU reads and writes it at the same address.

    Raises:
        SharpError: the system has none.
    """
    address, size = ctypes.c_void_p(), rows * columns * FLOAT_BYTES
    with driver.context() as call:
        call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), PORTABLE)
    return as_array(address.value or 0, rows, columns, partial(_free, driver))


def as_array(address: int, rows: int, columns: int, free: Callable[[int], object]) -> NDArray[np.float32]:
    """Memory at an address as float32 [rows, columns], which gives it to `free` when nobody has it any more."""
    memory = (ctypes.c_float * (rows * columns)).from_address(address)
    weakref.finalize(memory, free, address).atexit = False  # the driver may be gone then
    return np.ctypeslib.as_array(memory).reshape(rows, columns)


def _free(driver: Driver, address: int) -> None:
    try:
        with driver.context() as call:
            call("cuMemFreeHost", ctypes.c_void_p(address))
    except SharpError as error:
        logger.debug("page-locked memory was not given back: %s", error)
