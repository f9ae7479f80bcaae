"""Engines of TensorRT-RTX, built without a GPU: its builder compiles for any compute capability ahead of time."""

from pathlib import Path
from typing import Any

import onnx
from rich.progress import Progress

from sharp.exporter.graph.key_screens import leave_out_key_screens
from sharp.exporter.graph.lowering import inline
from sharp.exporter.tensorrt.engine import Engine, build_engine, check_quantization
from sharp.plugins.engine_manifest import EngineLimits
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Manifest

RUNTIME = "TensorRT-RTX"


def build(
    folder: Path, manifest: Manifest, compute_capability: int, limits: EngineLimits, progress: Progress
) -> Engine:
    """The engine of the model in `folder`, for GPUs of this compute capability (89 is 8.9).

    The attention runs as the standard ops of its function body: TensorRT-RTX takes no plugins.

    Raises:
        InputError: TensorRT-RTX does not know the compute capability, or cannot read the model.
        SharpError: the engine could not be built.
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
        model = inline(model)  # layers that differ call overloads of the function, and its parser may know none

    def configure(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)

    return build_engine(
        trt, RUNTIME, model, folder, manifest, (limits,), configure, progress, compute_capability=compute_capability
    )
