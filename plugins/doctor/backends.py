"""The ways to run the op, one function each; a function raises SharpError if something is missing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.core.errors import SharpError
from sharp.plugins import library_path
from sharp.plugins.cuda.device import find_device
from sharp.plugins.cuda.runtime import Cuda
from sharp.plugins.doctor.case import Case
from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.tensorrt.package import import_tensorrt, load_plugin

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
UPDATED = {"key_cache": "key_cache_out", "value_cache": "value_cache_out"}
SCALES = {"key_scale": "key_scale_out", "value_scale": "value_scale_out"}  # inputs and outputs of int8 and fp8 caches
FP8 = 17  # ONNX's number of FLOAT8E4M3FN

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class OpBackend:
    """A way to run the op: `ready` raises SharpError if this machine lacks it, and `run` computes a case.

    `dtypes` are the types of cases to run, as for `make_case`. `run` may raise any exception of its runtime.
    """

    name: str
    dtypes: tuple[str, ...]
    ready: Callable[[], None]
    run: Callable[[Case], AttentionOutput]


def backends() -> tuple[OpBackend, ...]:
    """Return all backends that doctor compares with the reference, whether they can run here or not."""
    return (
        OpBackend("ONNX Runtime on the CPU, our kernels", ("float32", "float16", "int8", "fp8"), _cpu_ready, _run_cpu),
        OpBackend("ONNX Runtime on the CPU, standard ops", ("float32",), _standard_ready, _run_standard),
        OpBackend("ONNX Runtime on a GPU, our kernels", ("float16", "float16/int8"), _cuda_ready, _run_cuda),
        OpBackend("Triton under PyTorch", ("float32", "float16", "int8", "fp8"), _triton_ready, _run_triton),
        OpBackend("TensorRT with our plugin", ("float16", "float16/int8"), _tensorrt_ready, _run_tensorrt),
    )


def _need(package: str, extra: str) -> Any:
    """Import a package, or raise SharpError that names the extra of ours with this package."""
    try:
        return __import__(package)
    except ModuleNotFoundError as error:
        raise SharpError(f"{package} is not installed: pip install 'sharp-attention[{extra}]'") from error


def _standard_ready() -> None:
    """Check that onnx and onnxruntime are installed, else raise SharpError."""
    _need("onnx", "export")
    _need("onnxruntime", "serve")


def _cpu_ready() -> None:
    """Check that onnx, onnxruntime and the CPU library are there, else raise SharpError."""
    _standard_ready()
    library_path("onnxruntime")


def _cuda_ready() -> None:
    """Check for ONNX Runtime's CUDA provider, Sharp's CUDA library and a GPU; raise SharpError if one is missing."""
    _standard_ready()
    if CUDA not in _need("onnxruntime", "gpu").get_available_providers():
        raise SharpError(
            f"onnxruntime has no {CUDA}: pip uninstall onnxruntime; pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
    library_path("cuda")
    find_device()


def _triton_ready() -> None:
    """Check that PyTorch and Triton are installed and find a GPU, else raise SharpError."""
    torch = _need("torch", "gpu")
    _need("triton", "gpu")
    if not torch.cuda.is_available():
        raise SharpError("PyTorch finds no GPU; the kernels need one with CUDA and a PyTorch that is built for it")


def _tensorrt_ready() -> None:
    """Check that onnx, TensorRT, CUDA, Sharp's TensorRT library and a GPU are there, else raise SharpError."""
    _need("onnx", "export")
    import_tensorrt()
    Cuda()
    library_path("tensorrt")
    find_device()


def _run_cpu(case: Case) -> AttentionOutput:
    """Run the case by the op's CPU kernel in ONNX Runtime."""
    return _run_session(case, "cpu", kernels=True)


def _run_standard(case: Case) -> AttentionOutput:
    """Run the case by the op's function body of standard ops, on ONNX Runtime's CPU provider."""
    return _run_session(case, "cpu", kernels=False)


def _run_cuda(case: Case) -> AttentionOutput:
    """Run the case by the op's CUDA kernels in ONNX Runtime."""
    return _run_session(case, "cuda", kernels=True)


def _run_session(case: Case, device: str, *, kernels: bool) -> AttentionOutput:
    """Run a step as the server does: all inputs and outputs bound, the caches in place with our kernels.

    `device` is "cpu" or "cuda"; without `kernels` the function of standard ops runs.

    Raises:
        SharpError: ONNX Runtime could not start the provider of the device.
    """
    import onnxruntime

    from sharp.plugins.doctor.model import make_model

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if kernels:
        options.register_custom_ops_library(library_path("onnxruntime"))
    provider = CUDA if device == "cuda" else CPU
    content = make_model(case, body=not kernels).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=[provider])
    if provider not in session.get_providers():
        raise SharpError(f"ONNX Runtime could not start its {provider}; its messages say which library is missing")
    binding = session.io_binding()
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.copy(), FP8)
        if array.dtype == np.uint8
        else onnxruntime.OrtValue.ortvalue_from_numpy(array.copy(), device, 0)
        for name, array in case.inputs.items()
    }
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    outputs = [output.name for output in session.get_outputs()]
    in_place = UPDATED | SCALES if kernels else {}
    cached = {updated: values[name] for name, updated in in_place.items() if name in values}
    for name in outputs:
        if name in cached:
            binding.bind_ortvalue_output(name, cached[name])
        else:
            binding.bind_output(name, device)
    session.run_with_iobinding(binding)
    return _attention_output(dict(zip(outputs, binding.copy_outputs_to_cpu(), strict=True)))


def _run_triton(case: Case) -> AttentionOutput:
    """Run the case by the Triton kernels in PyTorch; fp8 caches go in and come out as uint8 arrays."""
    import torch

    from sharp.plugins.triton.paged_attention import paged_attention

    tensors = {name: torch.from_numpy(array.copy()).cuda() for name, array in case.inputs.items()}
    fp8 = {name: tensor.view(torch.float8_e4m3fn) for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
    tensors |= fp8
    outputs = paged_attention(**tensors, normalizer=case.normalizer, **case.attributes)  # type: ignore[arg-type]
    scales = {name: tensors[name].cpu().numpy() for name in SCALES if name in tensors}
    held = (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for tensor in outputs)
    return AttentionOutput(*(tensor.cpu().numpy() for tensor in held), **scales)


def _run_tensorrt(case: Case) -> AttentionOutput:
    """Build an engine of one node, and run it with the caches in place.

    Raises:
        SharpError: TensorRT refused the node or the step, or could not build the engine.
    """
    from sharp.plugins.doctor.model import make_model
    from sharp.plugins.tensorrt.nodes import leave_to_plugin

    trt, cuda = import_tensorrt(), Cuda()
    load_plugin(trt)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    model = make_model(case, flag_as_int32=True)
    leave_to_plugin(model)
    if not parser.parse(model.SerializeToString()):
        raise SharpError(f"TensorRT's parser refused the node: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    content = builder.build_serialized_network(network, config)
    if content is None:
        raise SharpError("TensorRT could not build an engine of the node; its messages are above")
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(content)
    context = engine.create_execution_context()

    inputs = {name: np.asarray(array, order="C") for name, array in case.inputs.items()}
    inputs["collect_stats"] = inputs["collect_stats"].astype(np.int32)
    outputs = {"output": np.empty_like(inputs["query"]), "stats": np.empty(case.expected.stats.shape, np.float32)}
    stream = int(cuda.call("cudaStreamCreate"))
    memory = {name: int(cuda.call("cudaMalloc", array.nbytes)) for name, array in (inputs | outputs).items()}
    for name, array in inputs.items():
        cuda.copy_to_device(memory[name], array, stream)
    in_place = {name: updated for name, updated in (UPDATED | SCALES).items() if name in inputs}
    addresses = memory | {updated: memory[name] for name, updated in in_place.items()}
    for name, address in addresses.items():
        context.set_tensor_address(name, address)
    if not context.execute_async_v3(stream):
        raise SharpError("TensorRT refused the step; its messages are above")
    outputs |= {updated: np.empty_like(inputs[name]) for name, updated in in_place.items()}
    for name, array in outputs.items():
        cuda.copy_to_host(array, addresses[name], stream)
    cuda.call("cudaStreamSynchronize", stream)
    for address in memory.values():
        cuda.call("cudaFree", address)
    return _attention_output(outputs)


def _attention_output(outputs: Outputs) -> AttentionOutput:
    """Return ONNX outputs, given by name, as one `AttentionOutput`; scales are set only if the op updated them."""
    scales = {name: outputs[updated] for name, updated in SCALES.items() if updated in outputs}
    return AttentionOutput(*(outputs[name] for name in ("output", *UPDATED.values(), "stats")), **scales)
