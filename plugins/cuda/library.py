"""`libsharp_cuda.so` from Python: its C structures, for tests and benchmarks that launch without a runtime."""

from collections.abc import Mapping
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from sharp.core.errors import SharpError
from sharp.plugins.op.attributes import ATTRIBUTE_DEFAULTS
from sharp.plugins.op.c_layout import attribute_fields, call_fields
from sharp.plugins.op.definition import ATTENTION, MOST_COEFFICIENTS, NORMALIZERS, PAGED_ATTENTION
from sharp.plugins.op.definition import TYPES as TYPES

_KINDS: dict[str, type] = {
    "enum": c_int,
    "int32": c_int32,
    "int64": c_int64,
    "float": c_float,
    "floats": c_float * MOST_COEFFICIENTS,
    "pointer": c_void_p,
}


class AttributesStruct(Structure):
    """SharpAttributes of sharp_op.h in ctypes."""

    _fields_ = tuple((field.name, _KINDS[field.kind]) for field in attribute_fields())

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "AttributesStruct":
        """Return the attributes in `values`, by name, unchecked; attributes left out have their defaults.

        `normalizer` and `scale` must be given, the former as a name of Sharp's. None stands for the default.
        """
        given = {**ATTRIBUTE_DEFAULTS, **{name: value for name, value in values.items() if value is not None}}
        made = cls()
        for field in attribute_fields():
            if field.name == "normalizer":
                made.normalizer = normalizer_number(given["normalizer"])
            elif field.kind == "floats":
                made.temperature_coefficients = tuple(given[field.name])
                made.temperature_terms = len(given[field.name])
            elif field.name in given:
                setattr(made, field.name, given[field.name])
        return made


_KINDS["attributes"] = AttributesStruct


class Problem(Structure):
    """SharpPagedAttention of sharp_op.h in ctypes: one call of PagedAttention.

    Pointers are addresses of device memory, None if absent. Fields that are left out are 0.
    """

    _fields_ = tuple((field.name, _KINDS[field.kind]) for field in call_fields(PAGED_ATTENTION))


class AttentionProblem(Structure):
    """SharpAttention of sharp_op.h in ctypes: one call of SharpAttention.

    Pointers are addresses of device memory, None if absent. Fields that are left out are 0.
    """

    _fields_ = tuple((field.name, _KINDS[field.kind]) for field in call_fields(ATTENTION))


class SamplingStruct(Structure):
    """SharpSampling of sharp_cuda.h in ctypes; pointers are addresses of memory that the device reads and writes."""

    _fields_ = (
        ("rows", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("logits", "indices", "samplings", "starts", "changes")),
        *((name, c_void_p) for name in ("candidates", "sampled")),
    )


def normalizer_number(name: str) -> int:
    """Return the value of the C enum SharpNormalizer for the name of one of Sharp's normalizers.

    Raises:
        StopIteration: there is no such normalizer.
    """
    return next(normalizer.code for normalizer in NORMALIZERS if normalizer.name == name)


class Library:
    """The functions of `libsharp_cuda.so`, called in the current CUDA context (`Driver.context`).

    Every method that calls the library raises SharpError with the library's message if the call failed.

    Raises:
        SharpError: the library at `path` cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = CDLL(str(path))
        except OSError as error:
            raise SharpError(f"{path} cannot be loaded: {error}") from error
        self._library.sharp_cuda_last_error.restype = c_char_p
        self._library.sharp_cuda_workspace_bytes.argtypes = (POINTER(Problem), c_int, POINTER(c_size_t))
        self._library.sharp_cuda_prepare.argtypes = (POINTER(Problem),)
        self._library.sharp_cuda_paged_attention.argtypes = (POINTER(Problem), c_void_p, c_void_p)
        attention = (POINTER(AttentionProblem), c_int, POINTER(c_size_t))
        self._library.sharp_cuda_attention_workspace_bytes.argtypes = attention
        self._library.sharp_cuda_prepare_attention.argtypes = (POINTER(AttentionProblem),)
        self._library.sharp_cuda_attention.argtypes = (POINTER(AttentionProblem), c_void_p, c_void_p)
        self._library.sharp_cuda_sample.argtypes = (POINTER(SamplingStruct), c_void_p)

    def workspace_bytes(self, problem: Problem | AttentionProblem, *, or_smaller: bool = False) -> int:
        """Return the number of bytes of device memory that a call of this size needs, or any smaller one as well.

        Raises:
            SharpError: the call is not valid, or the library lacks a kernel.
        """
        size = c_size_t()
        paged = isinstance(problem, Problem)
        ask = self._library.sharp_cuda_workspace_bytes if paged else self._library.sharp_cuda_attention_workspace_bytes
        self._check(ask(byref(problem), or_smaller, byref(size)))
        return size.value

    def add_kernels(self, folder: Path) -> None:
        """Add the kernels of a folder that `write_package` wrote; they are read at once, so the folder may then go.

        Raises:
            SharpError: the folder is damaged, or of another version of Sharp.
        """
        self._check(self._library.sharp_cuda_add_kernels(str(folder).encode()))

    def has_kernel(self, name: str, capability: int) -> bool:
        """Return whether the library has machine code or PTX of the kernel `name` for a capability (90 is 9.0)."""
        return int(self._library.sharp_cuda_find_kernel(name.encode(), capability)) == 0

    def prepare(self, problem: Problem | AttentionProblem) -> None:
        """Load the kernels that such a call launches, so that the call itself need not, for example in a CUDA graph.

        Raises:
            SharpError: the library lacks a kernel, or the driver cannot load it.
        """
        paged = isinstance(problem, Problem)
        load = self._library.sharp_cuda_prepare if paged else self._library.sharp_cuda_prepare_attention
        self._check(load(byref(problem)))

    def prepare_sampling(self) -> None:
        """Load the kernel that samples tokens.

        Raises:
            SharpError: the library lacks the kernel, or the driver cannot load it.
        """
        self._check(self._library.sharp_cuda_prepare_sampling())

    def sample(self, sampling: SamplingStruct, stream: int) -> None:
        """Enqueue a sampling call on a stream (its address; 0: the default stream).

        Raises:
            SharpError: the launch failed.
        """
        self._check(self._library.sharp_cuda_sample(byref(sampling), stream))

    def attention(self, problem: AttentionProblem, workspace: int, stream: int) -> None:
        """Enqueue a call of SharpAttention on a stream (its address; 0: the default stream).

        `workspace` is the address of device memory of at least `workspace_bytes`.

        Raises:
            SharpError: the call is not valid, the library lacks a kernel, or a launch failed.
        """
        self._check(self._library.sharp_cuda_attention(byref(problem), workspace, stream))

    def paged_attention(self, problem: Problem, workspace: int, stream: int) -> None:
        """Enqueue a call of PagedAttention on a stream (its address; 0: the default stream).

        `workspace` is the address of device memory of at least `workspace_bytes`.

        Raises:
            SharpError: the call is not valid, the library lacks a kernel, or a launch failed.
        """
        self._check(self._library.sharp_cuda_paged_attention(byref(problem), workspace, stream))

    def _check(self, status: int) -> None:
        """Raise SharpError with the library's last message if a function returned a status other than 0."""
        if status:
            raise SharpError(self._library.sharp_cuda_last_error().decode())
