"""Engines of TensorRT-RTX, whose builder compiles for any compute capability ahead of time and needs no GPU."""

from pathlib import Path
from typing import Any

import onnx
from rich.progress import Progress

from sharp.core.engine_manifest import EngineLimits
from sharp.core.errors import InputError
from sharp.core.manifest import Manifest
from sharp.exporter.graph.key_screens import leave_out_key_screens
from sharp.exporter.graph.lowering import inline
from sharp.exporter.tensorrt.engine import TensorRTEngine, build_engine, check_quantization

RUNTIME = "TensorRT-RTX"


def build(
    folder: Path, manifest: Manifest, compute_capability: int, limits: EngineLimits, progress: Progress
) -> TensorRTEngine:
    """Build the engine of the model in `folder`, for GPUs of this compute capability (89 is 8.9).

    Attention runs as the standard ops of its function body, because TensorRT-RTX takes no plugins. Nothing is written;
    `TensorRTEngine.write` writes the engine.

    Raises:
        InputError: TensorRT-RTX does not know the compute capability, does not support the model's weights, cache or
            target, or cannot read the model.
        SharpError: the engine could not be built.
        ImportError: the package of TensorRT-RTX is not installed.
    """
    import tensorrt_rtx_bindings as trt

    capability = getattr(trt.ComputeCapability, f"SM{compute_capability}", None)
    if capability is None:
        known = [name[2:] for name in trt.ComputeCapability.__members__ if name[2:].isdigit()]
        raise InputError(f"--compute-capability is {compute_capability}, but must be one of: {', '.join(known)}")
    path = folder / manifest.model_file
    check_quantization(path, manifest, RUNTIME)
    if manifest.cache.beside:
        raise InputError(
            f"{path} has an {manifest.cache.dtype} cache, which no function body knows; export the model again with "
            "another --kv-dtype"
        )
    if manifest.target == "tensorrt":
        raise InputError(
            f"{path} was exported with --target tensorrt and needs a plugin, which TensorRT-RTX does not take; "
            "export the model again with --target portable"
        )
    model = onnx.load(path, load_external_data=False)
    if manifest.cache.key_screens:
        leave_out_key_screens(model)
    if model.functions:
        model = inline(model)  # layers that differ call overloads of the function, which the parser may not support

    def configure(config: Any) -> None:
        """Set the one compute capability that the engine is for."""
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)

    return build_engine(
        trt, RUNTIME, model, folder, manifest, (limits,), configure, progress, compute_capability=compute_capability
    )
