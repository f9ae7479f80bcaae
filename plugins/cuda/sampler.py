"""`DeviceSampler`: tokens from logits on a GPU, by the kernel of `sharp.plugins.triton.sampling`."""

import ctypes
import logging
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.plugins import library_path
from sharp.plugins.cuda.device import Driver, find_device
from sharp.plugins.cuda.library import Library, Sampling
from sharp.plugins.cuda.readback import FLOAT_BYTES, page_locked
from sharp.plugins.errors import SharpError

logger = logging.getLogger(__name__)

KERNEL = "sample_rows"
PARAMETERS = 5  # of a row
CANDIDATES = 4096  # SHARP_SAMPLING_CANDIDATES
ROW_FLOATS = 2 * (PARAMETERS + 2)  # of page-locked memory: parameters, index and token of 8 bytes each
FEWEST_ROWS = 64  # even, so that all three begin at 16 bytes
DEFAULT_STREAM = 0


class DeviceSampler:
    """Samples on the GPU's default stream and waits for the tokens.

    What the kernel is told, 48 bytes a row, is copied to the GPU: every thread reads it, and through the bus that would
    be thousands of reads. The tokens it writes into page-locked memory of the host itself. ONNX Runtime has waited for
    its own stream when a run returns.
    """

    def __init__(self, library: Library, vocab: int, number: int) -> None:
        """For logits of so many tokens, on the GPU of this number.

        Raises:
            SharpError: the kernel cannot be loaded, or there is no page-locked memory.
        """
        self._library = library
        self._driver = Driver(number)
        self._vocab = vocab
        self._rows = 0  # for which there is memory
        self._logits, self._logits_rows = _DeviceMemory(self._driver, 0), 0
        with self._driver.context():
            library.prepare_sampling()
        self._reserve(FEWEST_ROWS)

    def logits(self, rows: int) -> int:
        """The address of memory of the GPU for so many rows of logits, kept from step to step."""
        if rows > self._logits_rows:
            self._logits = _DeviceMemory(self._driver, 0)  # what was there goes first
            self._logits = _DeviceMemory(self._driver, rows * self._vocab * FLOAT_BYTES)
            self._logits_rows = rows
        return self._logits.address

    def sample(self, logits: int, indices: NDArray[np.int64], samplings: NDArray[np.float64]) -> NDArray[np.int64]:
        """As `sharp.plugins.sampling.sample`, of the rows `indices` of logits at an address of the GPU.

        Raises:
            SharpError: the launch or the GPU failed.
        """
        rows = len(samplings)
        if rows > self._rows:
            self._reserve(rows)
        self._samplings[:rows], self._indices[:rows] = samplings, indices
        given = Sampling(
            rows=rows,
            vocab=self._vocab,
            logits=logits,
            samplings=self._told.address,
            indices=self._told.address + self._samplings.nbytes,
            candidates=self._candidates.address,
            sampled=self._sampled.ctypes.data,
        )
        size = ctypes.c_size_t(self._samplings.nbytes + self._indices.nbytes)
        stream = ctypes.c_void_p(DEFAULT_STREAM)
        with self._driver.context() as call:
            call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self._told.address), self._samplings.ctypes, size, stream)
            self._library.sample(given, DEFAULT_STREAM)
            call("cuStreamSynchronize", stream)
        return self._sampled[:rows].copy()  # the next step writes over it

    def _reserve(self, rows: int) -> None:
        rows = 1 << (rows - 1).bit_length()
        memory = page_locked(self._driver, rows, ROW_FLOATS).reshape(-1)
        memory[:] = 0
        ends = [2 * PARAMETERS * rows, 2 * (PARAMETERS + 1) * rows]
        parameters, indices, sampled = np.split(memory, ends)
        self._samplings = parameters.view(np.float64).reshape(rows, PARAMETERS)
        self._indices, self._sampled = indices.view(np.int64), sampled.view(np.int64)
        self._told = _DeviceMemory(self._driver, self._samplings.nbytes + self._indices.nbytes)
        self._candidates = _DeviceMemory(self._driver, rows * CANDIDATES * FLOAT_BYTES)
        self._rows = rows


class _DeviceMemory:
    """Bytes of the GPU, given back when nobody has them any more."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.address = 0
        if size:
            address = ctypes.c_uint64()
            with driver.context() as call:
                call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self.address = address.value
            weakref.finalize(self, _free, driver, self.address).atexit = False  # the driver may be gone then


def _free(driver: Driver, address: int) -> None:
    try:
        with driver.context() as call:
            call("cuMemFree_v2", ctypes.c_uint64(address))
    except SharpError as error:
        logger.debug("memory of the GPU was not given back: %s", error)


def find_sampler(vocab: int, number: int) -> DeviceSampler | None:
    """The sampler of the GPU of this number, or None with a line in the log: then the host samples."""
    try:
        library = Library(Path(library_path("cuda")))
        capability = find_device(number).compute_capability
        if not library.has_kernel(KERNEL, capability):
            logger.warning(
                "tokens are sampled on the host, as there is no kernel %s for compute capability %d.%d; "
                "`sharp build FOLDER --backend cuda` compiles it",
                *(KERNEL, capability // 10, capability % 10),
            )
            return None
        return DeviceSampler(library, vocab, number)
    except SharpError as error:
        logger.warning("tokens are sampled on the host: %s", error)
        return None
