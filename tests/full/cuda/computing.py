"""Let the GPU libraries compute results: Triton's interpreter runs each launch of the fake driver over host memory.

The results are those that a GPU would compute from the same launches. The module is for processes that set
TRITON_INTERPRET=1 and load the fake driver as libcuda.
"""

import ctypes
import os
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sharp.plugins.cuda.compiler import SpecializedKernel
from sharp.plugins.cuda.kernel_set import kernels_for
from tests.full.cuda.native import fake_options
from tests.full.triton import interpreted
from tests.full.triton.interpreted import MEMORY

CAPABILITY = int(os.environ.get("SHARP_FAKE_CAPABILITY", "90"))  # the fake driver's capability
TYPES = {
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*i8": torch.int8,
    "*u8": torch.uint8,
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*fp64": torch.float64,
    "*u1": torch.bool,
}
NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
COMPUTE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_void_p))


class Memory(TorchFunctionMode):
    """A record of all memory that torch allocates inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if isinstance(result, torch.Tensor):
            self._tensors[id(result)] = weakref.ref(result)
        return result

    def places(self) -> Iterable[tuple[int, int]]:
        """Return where each block of memory that still exists begins and ends."""
        self._tensors = {number: tensor for number, tensor in self._tensors.items() if tensor() is not None}
        with torch.DisableTorchFunction():
            storages = [tensor().untyped_storage() for tensor in self._tensors.values()]
            return {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}


class Device:
    """A device that runs the launches of the fake driver, and checks memory accesses if `memory` is given."""

    def __init__(self, memory: Memory | None = None) -> None:
        interpreted.start()
        self.failures: list[str] = []
        self.launches: list[str] = []  # names of kernels
        self._memory = memory
        self._function = COMPUTE(self._compute)
        ctypes.CDLL("libcuda.so.1").fake_compute(self._function)

    def _compute(self, image: int, x: int, y: int, z: int, parameters: Any) -> None:
        described = ctypes.string_at(image)
        name = ctypes.string_at(image + len(described) + 1).decode()
        self.launches.append(name)
        try:
            self._launch(kernels()[name], described.decode().split()[1:], (x, y, z), parameters)
        except Exception as error:  # no exception may leave a function that C calls
            self.failures.append(f"{name}: {error!r}")

    def _launch(self, kernel: SpecializedKernel, words: list[str], grid: tuple[int, int, int], parameters: Any) -> None:
        arguments = {}
        for index, name in enumerate(word.partition(":")[0] for word in words):
            kind = kernel.arguments.get(name, "")
            if kind.startswith("*"):
                arguments[name] = _tensor(ctypes.c_uint64.from_address(parameters[index]).value, TYPES[kind])
            elif kind:
                arguments[name] = NUMBERS[kind].from_address(parameters[index]).value
        with MEMORY.watched(self._memory.places() if self._memory else ()):
            kernel.function[grid](**arguments, **kernel.constants)


def _tensor(address: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that the interpreter accepts as a pointer."""
    if address == 0:
        return torch.zeros(1, dtype=dtype)  # memory that is not watched
    return torch.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(address), dtype=dtype)


@cache
def kernels() -> dict[str, SpecializedKernel]:
    """Return all kernels of the package that `fake_package` writes, by name."""
    return {kernel.name: kernel for kernel in kernels_for(fake_options(), CAPABILITY)}
