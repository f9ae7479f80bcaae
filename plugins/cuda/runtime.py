"""CUDA's runtime from Python, through the package cuda-python."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cuda.readback import as_array
from sharp.plugins.errors import SharpError

PORTABLE = 1  # cudaHostAllocPortable: page-locked for every context


class Cuda:
    """CUDA's runtime as `cuda.bindings` has it; a failed call becomes an exception.

    Raises:
        SharpError: cuda-python is not installed, or a call failed.
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
        """What the function returns after its status: nothing, one value or a tuple."""
        status, *values = getattr(self._runtime, function)(*arguments)
        if int(status):
            raise SharpError(f"{function} failed: {getattr(status, 'name', status)}")
        return values[0] if len(values) == 1 else tuple(values)

    def page_locked(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Memory of the host that the GPU writes without a detour, float32 [rows, columns]."""
        address = int(self.call("cudaHostAlloc", rows * columns * 4, PORTABLE))
        return as_array(address, rows, columns, self._runtime.cudaFreeHost)

    def copy_to_device(self, address: int, array: NDArray[Any], stream: Any) -> None:
        """Put a copy on the stream."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, stream)

    def copy_to_host(self, array: NDArray[Any], address: int, stream: Any) -> None:
        """Put a copy on the stream."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, stream)
