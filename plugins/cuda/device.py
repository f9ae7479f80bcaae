"""The machine's NVIDIA GPUs, asked through the driver's own library: no other package is needed."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sharp.plugins.errors import SharpError

DRIVER = "libcuda.so.1"
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@dataclass(frozen=True)
class Device:
    """A GPU: 90 is compute capability 9.0, `memory` is in bytes, `cuda` is the newest CUDA that the driver runs."""

    name: str
    compute_capability: int
    memory: int
    cuda: str


def find_device(number: int = 0) -> Device:
    """The GPU with this number, of those that this process may use.

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
    return Device(name.value.decode(), 10 * capability[0] + capability[1], memory.value, cuda)


class Driver:
    """The driver's functions, called in the context of a GPU that runtimes use too."""

    def __init__(self, number: int = 0) -> None:
        """For the GPU with this number.

        Raises:
            SharpError: there is no driver, or no such GPU.
        """
        self._driver = _driver(number)
        self._device = ctypes.c_int()
        _check(self._driver.cuDeviceGet(ctypes.byref(self._device), number))

    @contextmanager
    def context(self) -> Iterator[Callable[..., None]]:
        """What calls a function by its name, with the context current.

        Raises:
            SharpError: a call failed.
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
    """Bytes that can still be taken on a GPU.

    Raises:
        SharpError: there is no GPU.
    """
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with Driver(number).context() as call:
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def check_context(number: int = 0) -> None:
    """Wait for a GPU's work.

    Raises:
        SharpError: the context is broken, say by an illegal access: every call in this process fails from then on.
    """
    with Driver(number).context() as call:
        call("cuCtxSynchronize")


def clear_memory(address: int, size: int, number: int = 0) -> None:
    """Make `size` bytes of a GPU's memory zero.

    Raises:
        SharpError: the driver refused it.
    """
    if size == 0:
        return
    with Driver(number).context() as call:
        call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))
        call("cuCtxSynchronize")


def _driver(number: int) -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise SharpError(f"there is no NVIDIA driver on this machine ({DRIVER} is missing)") from error
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        raise SharpError("the NVIDIA driver finds no GPU that this process may use")
    if number >= count.value:
        raise SharpError(f"there is no GPU {number}: this process may use {count.value}, numbered from 0")
    return driver


def _check(status: int) -> None:
    if status:
        words = ctypes.c_char_p()
        ctypes.CDLL(DRIVER).cuGetErrorString(status, ctypes.byref(words))
        raise SharpError(f"the NVIDIA driver says: {(words.value or b'unknown error').decode()} (CUDA error {status})")
