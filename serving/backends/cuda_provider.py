"""ONNX Runtime's provider for NVIDIA GPUs: whether it can run a model, its options, and tensors in GPU memory."""

import logging
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np
import onnxruntime

from sharp.plugins import library_path
from sharp.plugins.cuda.device import clear_memory, find_device
from sharp.plugins.op.cache_tensors import ELEMENTS, CacheTensor
from sharp.serving.api.errors import InputError, SharpError

logger = logging.getLogger(__name__)

PROVIDER = "CUDAExecutionProvider"


def choose_device(device: str, kernels: bool, gpu: int = 0) -> str:
    """Return the kind of device that a model runs on: "cuda" or "cpu".

    `device` is "cpu", "auto", or another name for the GPU with number `gpu`. "auto" chooses that GPU if the model runs
    with Sharp's kernels (`kernels`) and everything that they need is installed, and the CPU otherwise. For a GPU,
    CUDA's libraries are loaded, too.

    Raises:
        InputError: the GPU is requested, but something is missing; the message says what.
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
            # A user who has installed the GPU package expects the GPU, so tell them.
            level = logging.WARNING if PROVIDER in onnxruntime.get_available_providers() else logging.DEBUG
            logger.log(level, "the model runs on the CPU: %s", error)
            return "cpu"
        raise InputError(f"--device {device} cannot be used: {error}") from error
    # CUDA's libraries are installed as Python packages, where the linker does not find them.
    if find_spec("nvidia") is not None:
        onnxruntime.preload_dlls()
    return "cuda"


def provider_options(number: int, *, cuda_graphs: bool) -> tuple[str, dict[str, str]]:
    """Return the provider of GPU `number` and its options in the form that `InferenceSession` takes.

    Matrix products of float32 use float32. ONNX Runtime's default, TensorFloat-32, has a mantissa of 10 bits, so the
    served model would differ from the model that was verified to 1e-4. The arena grows by the size requested, not by
    powers of two, so that the memory left by the largest step is available to the cache. `cuda_graphs` lets sessions
    capture graphs.
    """
    return PROVIDER, {
        "device_id": str(number),
        "enable_cuda_graph": str(int(cuda_graphs)),
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
    }


def _check_provider() -> None:
    """Check that ONNX Runtime has the CUDA provider, else raise SharpError."""
    if PROVIDER not in onnxruntime.get_available_providers():
        raise SharpError(
            f"onnxruntime {onnxruntime.__version__} has no {PROVIDER}; install onnxruntime-gpu in its place "
            "(pip uninstall onnxruntime; pip install 'onnxruntime-gpu[cuda,cudnn]')"
        )


def check_session(session: Any) -> None:
    """Check that ONNX Runtime uses the GPU: when the provider fails, it only warns and runs on the CPU.

    Raises:
        InputError: the session runs on the CPU.
    """
    if PROVIDER not in session.get_providers():
        raise InputError(
            f"--device cuda cannot be used: ONNX Runtime could not start its {PROVIDER}; its messages above say which "
            "library of CUDA or cuDNN is missing (pip install 'onnxruntime-gpu[cuda,cudnn]' brings them)"
        )


def device_tensor(shape: tuple[int, ...], onnx_type: int, number: int) -> Any:
    """Return an uninitialized `OrtValue` of the ONNX tensor type `onnx_type` on the GPU with number `number`."""
    return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, onnx_type, "cuda", number)


def device_cache(tensor: CacheTensor, blocks: int, number: int) -> Any:
    """Return an `OrtValue` of `blocks` blocks of a cache tensor, filled with zeros, on the GPU with number `number`."""
    kind, onnx_type = ELEMENTS[tensor.dtype]
    shape = (blocks, *tensor.block_shape)
    value = device_tensor(shape, onnx_type, number)
    clear_memory(value.data_ptr(), prod(shape) * np.dtype(kind).itemsize, number)
    return value
