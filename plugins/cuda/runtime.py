"""CUDA's runtime in Python, through the package cuda-python."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.core.errors import SharpError
from sharp.plugins.cuda.readback import as_array

PORTABLE = 1  # cudaHostAllocPortable: page-locked for every context


class Cuda:
    """CUDA's runtime from `cuda.bindings`; every method raises SharpError if a call of CUDA failed.

    Raises:
        SharpError: cuda-python is not installed.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except ModuleNotFoundError as error:
            raise SharpError(
                "the package cuda-python is not installed; install it with: pip install cuda-python"
            ) from error
        self._runtime = runtime

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of CUDA's runtime, and return what follows its status: a value, or a tuple of 0, 2 or more.

        Raises:
            SharpError: the status is an error.
        """
        status, *values = getattr(self._runtime, function)(*arguments)
        if int(status):
            raise SharpError(f"{function} failed: {getattr(status, 'name', status)}")
        return values[0] if len(values) == 1 else tuple(values)

    def page_locked(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Return host memory that the GPU writes directly, float32 [rows, columns], with any content.

        The memory is freed when no array refers to it any more.

        Raises:
            SharpError: there is no such memory left.
        """
        address = int(self.call("cudaHostAlloc", rows * columns * 4, PORTABLE))
        return as_array(address, rows, columns, self._runtime.cudaFreeHost)

    def copy_to_device(self, address: int, array: NDArray[Any], stream: Any) -> None:
        """Enqueue a copy from a contiguous array to device memory on the stream; keep the array until it is done."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, stream)

    def copy_to_host(self, array: NDArray[Any], address: int, stream: Any) -> None:
        """Enqueue a copy from device memory into a contiguous array on the stream; wait before reading the array."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, stream)
