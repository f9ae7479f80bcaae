"""`Readback`: rows of a tensor on a GPU, copied into page-locked memory of the host, which the GPU writes directly."""

import ctypes
import logging
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sharp.core.errors import SharpError
from sharp.plugins.cuda.device import Driver

logger = logging.getLogger(__name__)

PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked for every context
FLOAT_BYTES = 4


class Readback:
    """Host memory for rows of float32 that is kept from step to step, page-locked if the system has such memory.

    Raises:
        SharpError: there is no driver, or no such GPU.
    """

    def __init__(self, columns: int, number: int) -> None:
        """Prepare for rows of `columns` numbers, from the GPU with this number."""
        self._columns = columns
        self._driver = Driver(number)
        self._memory = np.empty((0, columns), np.float32)

    def rows(self, count: int) -> NDArray[np.float32]:
        """Return memory for `count` rows, float32 [count, columns], with any content.

        The next call of `rows` or `copy` returns the same memory again.
        """
        if len(self._memory) < count:
            self._memory = _memory(self._driver, count, self._columns)
        return self._memory[:count]

    def forget(self) -> None:
        """Release the memory, as soon as no array that was returned refers to it; it is allocated anew when needed."""
        self._memory = self._memory[:0].copy()

    def copy(self, address: int, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows `indices` [n] of a float32 tensor at an address of the GPU, as float32 [n, columns].

        A run of neighbouring rows is one copy. The next call of `rows` or `copy` overwrites the result.

        Raises:
            SharpError: the driver refused a copy.
        """
        found = self.rows(len(indices))
        starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)  # starts of runs of neighbouring rows, one copy each
        with self._driver.context() as call:
            for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(indices)], strict=True):
                source = address + int(indices[start]) * self._columns * FLOAT_BYTES
                part = found[start:end]
                call("cuMemcpyDtoH_v2", part.ctypes, ctypes.c_uint64(source), ctypes.c_size_t(part.nbytes))
        return found


def _memory(driver: Driver, rows: int, columns: int) -> NDArray[np.float32]:
    """Return page-locked memory, or ordinary memory if the system has none; copies into ordinary memory are slower.

    The memory is float32 [rows, columns].
    """
    try:
        return page_locked(driver, rows, columns)
    except SharpError as error:
        logger.warning("logits are copied through memory that is not page-locked, which is slower: %s", error)
        return np.empty((rows, columns), np.float32)


def page_locked(driver: Driver, rows: int, columns: int) -> NDArray[np.float32]:
    """Return page-locked memory, float32 [rows, columns], which a GPU reads and writes at the same address.

    The content is undefined. The memory is freed when no array refers to it any more.

    Raises:
        SharpError: the system has no page-locked memory left.
    """
    address, size = ctypes.c_void_p(), rows * columns * FLOAT_BYTES
    with driver.context() as call:
        call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), PORTABLE)
    return as_array(address.value or 0, rows, columns, partial(_free, driver))


def as_array(address: int, rows: int, columns: int, free: Callable[[int], object]) -> NDArray[np.float32]:
    """Return the memory at an address as float32 [rows, columns].

    `free` is called with the address when no array refers to the memory any more, but not at the interpreter's exit.
    """
    memory = (ctypes.c_float * (rows * columns)).from_address(address)
    weakref.finalize(memory, free, address).atexit = False  # at exit the driver may be gone
    return np.ctypeslib.as_array(memory).reshape(rows, columns)


def _free(driver: Driver, address: int) -> None:
    """Free page-locked memory by its address; a failure is only logged."""
    try:
        with driver.context() as call:
            call("cuMemFreeHost", ctypes.c_void_p(address))
    except SharpError as error:
        logger.debug("page-locked memory was not given back: %s", error)
