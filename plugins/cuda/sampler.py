"""`DeviceSampler`: tokens sampled from logits on a GPU, with the kernel of `sharp.plugins.triton.sampling`."""

import ctypes
import logging
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.core.errors import SharpError
from sharp.plugins import library_path
from sharp.plugins.cpu.sampling import CHANGE, MOST_CHANGES, Changes
from sharp.plugins.cuda.device import Driver, find_device
from sharp.plugins.cuda.library import Library, SamplingStruct
from sharp.plugins.cuda.readback import FLOAT_BYTES, page_locked

logger = logging.getLogger(__name__)

KERNEL = "sample_rows"
PARAMETERS = 5  # numbers per row
CANDIDATES = 4096  # SHARP_SAMPLING_CANDIDATES
# The number of 4-byte words per row in page-locked memory: parameters, index, two starts and token.
PARAMETER_WORDS, INDEX_WORDS, START_WORDS, TOKEN_WORDS = 2 * PARAMETERS, 2, 2, 2
END_WORDS = 4  # after the starts: the end of the last part, and padding to 16 bytes for what follows
FEWEST_ROWS = 64  # even, so that every part begins at a multiple of 16 bytes
DEFAULT_STREAM = 0


class DeviceSampler:
    """A sampler on a stream of the GPU, which waits for the tokens.

    The inputs of the kernel, 56 bytes per row and 16 per change, are copied to the GPU: every thread reads them, which
    would be thousands of reads over the bus. The kernel writes the tokens directly into page-locked memory of the host.
    ONNX Runtime has waited for its own stream when a run returns, so the default stream can be used after it.
    """

    def __init__(self, library: Library, vocab: int, number: int, stream: int = DEFAULT_STREAM) -> None:
        """Prepare for logits of `vocab` tokens, on the GPU with this number.

        Raises:
            SharpError: the kernel cannot be loaded, or there is no page-locked memory.
        """
        self._library = library
        self._driver = Driver(number)
        self._vocab = vocab
        self._stream = stream
        self._rows = 0  # the number of rows that the memory has room for
        self._logits, self._logits_rows = _DeviceMemory(self._driver, 0), 0
        with self._driver.context():
            library.prepare_sampling()
        words = page_locked(self._driver, MOST_CHANGES, CHANGE.itemsize // FLOAT_BYTES)
        self._changes = words.reshape(-1).view(CHANGE)
        self._told_changes = _DeviceMemory(self._driver, self._changes.nbytes)
        self._reserve(FEWEST_ROWS)

    def logits(self, rows: int) -> int:
        """Return the address of GPU memory for `rows` rows of logits, float32 [rows, vocab].

        The memory is kept from step to step. A call for more rows than before frees it, with its content.

        Raises:
            SharpError: the GPU has too little memory.
        """
        if rows > self._logits_rows:
            self._logits = _DeviceMemory(self._driver, 0)  # free the old memory first
            self._logits = _DeviceMemory(self._driver, rows * self._vocab * FLOAT_BYTES)
            self._logits_rows = rows
        return self._logits.address

    def sample(
        self,
        logits: int,
        indices: NDArray[np.int64],
        samplings: NDArray[np.float64],
        changes: Changes | None = None,
    ) -> NDArray[np.int64]:
        """Sample a token from each of the rows `indices` of logits at an address of the GPU, and wait for the tokens.

        The kernel changes the logits in place by `changes`, so a row with changes may occur in `indices` only once.

        Args:
            logits: the address of float32 [any, vocab].
            indices: [rows].
            samplings: [rows, 5]: sharpness, top_k, top_p, min_p and a random number in [0, 1), as for
                `sharp.plugins.cpu.sampling.sample`.
            changes: the changes of all rows, in the order of `indices`; at most MOST_CHANGES entries.

        Returns:
            int64 [rows]; NO_TOKEN (-1) for a row whose highest logit is not finite.

        Raises:
            SharpError: the launch or the GPU failed, or there is too little memory.
        """
        rows = len(samplings)
        if rows > self._rows:
            self._reserve(rows)
        self._samplings[:rows], self._indices[:rows] = samplings, indices
        self._starts[: 2 * rows + 1] = 0 if changes is None else changes.starts
        given = SamplingStruct(
            rows=rows,
            vocab=self._vocab,
            logits=logits,
            samplings=self._told.address,
            indices=self._told.address + self._samplings.nbytes,
            starts=self._told.address + self._samplings.nbytes + self._indices.nbytes,
            changes=self._told_changes.address,
            candidates=self._candidates.address,
            sampled=self._sampled.ctypes.data,
        )
        told = self._samplings.nbytes + self._indices.nbytes + self._starts.nbytes
        with self._driver.context() as call:
            self._copy(call, self._told, self._samplings.ctypes.data, told)
            if changes is not None and (count := len(changes.entries)):
                self._changes[:count] = changes.entries
                self._copy(call, self._told_changes, self._changes.ctypes.data, count * CHANGE.itemsize)
            self._library.sample(given, self._stream)
            call("cuStreamSynchronize", ctypes.c_void_p(self._stream))
        return self._sampled[:rows].copy()  # the next step overwrites the memory

    def _copy(self, call: Callable[..., None], to: "_DeviceMemory", address: int, size: int) -> None:
        """Start the copy of `size` bytes from host address `address` to device memory, on the sampler's stream.

        `call` is the function that `Driver.context` yields.
        """
        given = ctypes.c_uint64(to.address), ctypes.c_void_p(address), ctypes.c_size_t(size)
        call("cuMemcpyHtoDAsync_v2", *given, ctypes.c_void_p(self._stream))

    def _reserve(self, rows: int) -> None:
        """Allocate page-locked host memory and device memory for at least `rows` rows, rounded up to a power of two.

        The memory of earlier, fewer rows is replaced.
        """
        rows = 1 << (rows - 1).bit_length()
        sizes = [PARAMETER_WORDS * rows, INDEX_WORDS * rows, START_WORDS * rows + END_WORDS, TOKEN_WORDS * rows]
        memory = page_locked(self._driver, 1, sum(sizes)).reshape(-1)
        memory[:] = 0
        parameters, indices, starts, sampled = np.split(memory, np.cumsum(sizes)[:-1])
        self._samplings = parameters.view(np.float64).reshape(rows, PARAMETERS)
        self._indices, self._starts, self._sampled = (
            indices.view(np.int64),
            starts.view(np.int32),
            sampled.view(np.int64),
        )
        self._told = _DeviceMemory(self._driver, parameters.nbytes + indices.nbytes + starts.nbytes)
        self._candidates = _DeviceMemory(self._driver, rows * CANDIDATES * FLOAT_BYTES)
        self._rows = rows


class _DeviceMemory:
    """An allocation of `size` bytes of GPU memory at `address`, freed when this object is garbage-collected.

    With a size of 0 nothing is allocated and the address is 0.
    """

    def __init__(self, driver: Driver, size: int) -> None:
        self.address = 0
        if size:
            address = ctypes.c_uint64()
            with driver.context() as call:
                call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self.address = address.value
            weakref.finalize(self, _free, driver, self.address).atexit = False  # at exit the driver may be gone


def _free(driver: Driver, address: int) -> None:
    """Free device memory by its address; a failure is only logged."""
    try:
        with driver.context() as call:
            call("cuMemFree_v2", ctypes.c_uint64(address))
    except SharpError as error:
        logger.debug("memory of the GPU was not given back: %s", error)


def find_sampler(vocab: int, number: int, stream: int = DEFAULT_STREAM) -> DeviceSampler | None:
    """Return the sampler of the GPU with this number for logits of `vocab` tokens, or None with a line in the log.

    None means that the host must sample: there is no GPU, library, kernel or page-locked memory. `stream` is the
    address of the stream that the kernel runs on.
    """
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
        return DeviceSampler(library, vocab, number, stream)
    except SharpError as error:
        logger.warning("tokens are sampled on the host: %s", error)
        return None
