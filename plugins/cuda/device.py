"""The machine's NVIDIA GPUs, queried through the driver's own library, without any other package."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sharp.core.errors import SharpError

DRIVER = "libcuda.so.1"
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@dataclass(frozen=True)
class GpuDevice:
    """A GPU. Compute capability 90 is 9.0, `memory` is the total in bytes, `cuda` the newest CUDA that the driver runs.

    `cuda` is written "12.8".
    """

    name: str
    compute_capability: int
    memory: int
    cuda: str


def find_device(number: int = 0) -> GpuDevice:
    """Return the GPU with this number, among the GPUs that this process may use.

    Raises:
        SharpError: there is no driver, or no such GPU.
    """
    driver = _driver(number)
    device, name, memory, version = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
    capability = []
    _check(driver.cuDeviceGet(ctypes.byref(device), number))
    _check(driver.cuDeviceGetName(name, len(name), device))
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    _check(driver.cuDriverGetVersion(ctypes.byref(version)))
    for attribute in (MAJOR, MINOR):
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        capability.append(value.value)
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return GpuDevice(name.value.decode(), 10 * capability[0] + capability[1], memory.value, cuda)


class Driver:
    """The driver's functions, called in the primary context of a GPU, which runtimes use, too."""

    def __init__(self, number: int = 0) -> None:
        """Open the driver for the GPU with this number.

        Raises:
            SharpError: there is no driver, or no such GPU.
        """
        self._driver = _driver(number)
        self._device = ctypes.c_int()
        _check(self._driver.cuDeviceGet(ctypes.byref(self._device), number))

    @contextmanager
    def context(self) -> Iterator[Callable[..., None]]:
        """Make the context current, and yield a function (name, *arguments) that calls a driver function by its name.

        Arguments are those of the C function, in ctypes. The context is released at the end.

        Raises:
            SharpError: a call failed; also raised by the yielded function.
        """
        driver, context = self._driver, ctypes.c_void_p()
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device))
        try:
            _check(driver.cuCtxPushCurrent_v2(context))
            try:
                yield lambda function, *arguments: _check(getattr(driver, function)(*arguments))
            finally:
                driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        finally:
            driver.cuDevicePrimaryCtxRelease_v2(self._device)


def free_memory(number: int = 0) -> int:
    """Return the number of free bytes of the memory of the GPU with this number.

    Raises:
        SharpError: there is no driver or no such GPU, or the driver refused the call.
    """
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with Driver(number).context() as call:
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def check_context(number: int = 0) -> None:
    """Wait until the GPU with this number has finished the work of this process (in its primary context).

    Raises:
        SharpError: there is no such GPU, or the context is broken, for example by an illegal access; all later calls in
            this process then fail, too.
    """
    with Driver(number).context() as call:
        call("cuCtxSynchronize")


def clear_memory(address: int, size: int, number: int = 0) -> None:
    """Set `size` bytes of a GPU's memory from `address` on to zero, and wait until that is done.

    `number` is the GPU's number. Nothing happens for a size of 0.

    Raises:
        SharpError: there is no such GPU, or the driver refused the call.
    """
    if size == 0:
        return
    with Driver(number).context() as call:
        call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
        call("cuCtxSynchronize")


def _driver(number: int) -> ctypes.CDLL:
    """Load and initialise NVIDIA's driver library; `number` is the GPU that must exist, from 0.

    Raises:
        SharpError: there is no driver, no GPU, or no GPU of this number.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise SharpError(f"there is no NVIDIA driver on this machine ({DRIVER} is missing)") from error
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        raise SharpError(
            "the NVIDIA driver finds no GPU that this process may use; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if number >= count.value:
        raise SharpError(f"there is no GPU {number}: this process may use {count.value}, numbered from 0")
    return driver


def _check(status: int) -> None:
    """Raise SharpError with the driver's text for a CUDA status other than 0."""
    if status:
        words = ctypes.c_char_p()
        ctypes.CDLL(DRIVER).cuGetErrorString(status, ctypes.byref(words))
        raise SharpError(f"the NVIDIA driver says: {(words.value or b'unknown error').decode()} (CUDA error {status})")
