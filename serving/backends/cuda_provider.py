"""ONNX Runtime's provider for NVIDIA GPUs: whether it can run a model here, and memory that it computes in."""

import logging
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np
import onnxruntime

from sharp.plugins import library_path
from sharp.plugins.cache_tensors import ELEMENTS, CacheTensor
from sharp.plugins.cuda.device import clear_memory, find_device
from sharp.serving.api.errors import InputError, SharpError

logger = logging.getLogger(__name__)

PROVIDER = "CUDAExecutionProvider"


def choose_device(device: str, kernels: bool, gpu: int = 0) -> str:
    """The kind of device that a model runs on: "cuda" or "cpu".

    "auto" is the GPU of the number `gpu` where everything for our kernels is there, and the CPU otherwise.

    Raises:
        InputError: the GPU is requested, and something is missing; the message says what.
    """
    if device == "cpu" or (device == "auto" and not kernels):
        return "cpu"
    try:
        _check_provider()
        if kernels:
            library_path("cuda")
        find_device(gpu)
    except SharpError as error:
        if device == "auto":
            # Who has the package for GPUs will wonder.
            level = logging.WARNING if PROVIDER in onnxruntime.get_available_providers() else logging.DEBUG
            logger.log(level, "the model runs on the CPU: %s", error)
            return "cpu"
        raise InputError(f"--device {device} cannot be used: {error}") from error
    if find_spec("nvidia") is not None:  # CUDA's libraries as Python packages, which no linker finds by itself
        onnxruntime.preload_dlls()
    return "cuda"


def provider_options(number: int, *, cuda_graphs: bool) -> tuple[str, dict[str, str]]:
    """The provider and its options, as `InferenceSession` takes them.

    Matrix products of float32 are computed in float32: TensorFloat-32, ONNX Runtime's default, has 10 bits of mantissa,
    and a model that was verified to 1e-4 would not be the one that is served. Memory is taken as needed, and not in
    powers of two: what the largest step takes is what is left free of the cache.
    """
    return PROVIDER, {
        "device_id": str(number),
        "enable_cuda_graph": str(int(cuda_graphs)),
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
    }


def _check_provider() -> None:
    if PROVIDER not in onnxruntime.get_available_providers():
        raise SharpError(
            f"onnxruntime {onnxruntime.__version__} has no {PROVIDER}; install onnxruntime-gpu in its place "
            "(pip uninstall onnxruntime; pip install 'onnxruntime-gpu[cuda,cudnn]')"
        )


def check_session(session: Any) -> None:
    """Refuse a session that ONNX Runtime has left on the CPU: it does so with a warning when the provider fails.

    Raises:
        InputError: it is.
    """
    if PROVIDER not in session.get_providers():
        raise InputError(
            f"--device cuda cannot be used: ONNX Runtime could not start its {PROVIDER}; its messages above say which "
            "library of CUDA or cuDNN is missing (pip install 'onnxruntime-gpu[cuda,cudnn]' brings them)"
        )


def device_tensor(shape: tuple[int, ...], onnx_type: int, number: int) -> Any:
    """An OrtValue on a GPU; its content is what the memory held."""
    return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, onnx_type, "cuda", number)


def device_cache(tensor: CacheTensor, blocks: int, number: int) -> Any:
    """Zeros on a GPU for so many blocks of a cache tensor."""
    kind, onnx_type = ELEMENTS[tensor.dtype]
    shape = (blocks, *tensor.block_shape)
    value = device_tensor(shape, onnx_type, number)
    clear_memory(value.data_ptr(), prod(shape) * np.dtype(kind).itemsize, number)
    return value
