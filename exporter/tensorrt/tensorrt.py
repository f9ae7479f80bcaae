"""Engines of TensorRT, built on the GPU that will run them, with Sharp's plugin for attention."""

from pathlib import Path
from typing import Any

import onnx
from rich.progress import Progress

from sharp.core.engine_manifest import EngineLimits
from sharp.core.errors import InputError, SharpError
from sharp.core.manifest import Manifest
from sharp.exporter.graph.lowering import inline
from sharp.exporter.tensorrt.engine import TensorRTEngine, build_engine, check_quantization
from sharp.plugins import library_path
from sharp.plugins.cuda.device import find_device
from sharp.plugins.cuda.model_package import add_kernels_for_gpu
from sharp.plugins.op import schema
from sharp.plugins.op.function_body import rename_old_attention
from sharp.plugins.tensorrt.nodes import leave_to_plugin
from sharp.plugins.tensorrt.package import import_tensorrt, load_plugin

RUNTIME = "TensorRT"
FP8_CAPABILITY = 89  # the lowest compute capability on which TensorRT has fp8 tensors


def build(
    folder: Path, manifest: Manifest, limits: EngineLimits, timing_cache: Path, progress: Progress
) -> TensorRTEngine:
    """Build the engine of the model in `folder`, for this machine's GPU.

    Attention nodes become plugins of `libsharp_trt.so`. If the plugin is missing, attention nodes of a model that is
    not paged become the standard ops of their function body, and `progress` prints a note. A paged model gets two
    optimization profiles, one for steps that compute one token of each sequence and one for all steps. The file
    `timing_cache` is read if it exists, and written, which makes the next build faster. With the plugin, kernels for
    this GPU are added to `folder` if it lacks them. Nothing else is written; `TensorRTEngine.write` writes the engine.

    Raises:
        InputError: TensorRT cannot read the model, or does not support its weights or its cache on this GPU; kernels or
            the plugin that the model needs are missing; or `timing_cache` is of another version.
        SharpError: TensorRT or the plugin is missing, or the engine could not be built.
    """
    trt = import_tensorrt(", or build for --backend tensorrt-rtx, which needs neither GPU nor plugin")
    path = folder / manifest.model_file
    check_quantization(path, manifest, RUNTIME)
    if manifest.cache.dtype == "fp8":
        _check_fp8(path)
    model = onnx.load(path, load_external_data=False)
    paged = manifest.cache.form == "paged"
    plugin = None
    if manifest.target != "portable":
        rename_old_attention(model)  # the parser ignores domains and would take Attention for ONNX's op
        obstacle = None if paged else _obstacle()
        if obstacle is None:
            leave_to_plugin(model)
            flag_as_int32(model)
            plugin = load_plugin(trt)
            add_kernels_for_gpu(folder)  # the builder runs the plugin, which needs the kernels
        elif model.functions:
            progress.console.print(f"attention becomes standard ops: {obstacle}", highlight=False, soft_wrap=True)
            model = inline(model)
        else:
            raise InputError(
                f"{path} was exported with --target tensorrt and needs the plugin, but {obstacle}; export the model "
                "again with --target portable"
            )
    kept: list[Any] = []

    def configure(config: Any) -> None:
        """Set the builder's options: the aliased inputs of the plugin, and the timing cache."""
        if plugin:
            # Without this feature, the plugin copies the whole cache in every step.
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        cache = config.create_timing_cache(timing_cache.read_bytes() if timing_cache.is_file() else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            raise InputError(f"{timing_cache} is not a timing cache of TensorRT {trt.__version__}; remove it")
        kept.append(config)

    name = Path(plugin).name if plugin else None
    decode = limits.model_copy(update={"tokens": limits.sequences})
    profiles = (decode, limits) if paged and limits.tokens > limits.sequences else (limits,)
    engine = build_engine(
        trt,
        RUNTIME,
        model,
        folder,
        manifest,
        profiles,
        configure,
        progress,
        plugin=name,
    )
    timing_cache.write_bytes(bytes(kept[0].get_timing_cache().serialize()))
    return engine


def _check_fp8(path: Path) -> None:
    """Check that the GPU has compute capability 8.9 or more, which fp8 caches need; else raise InputError."""
    device = find_device()
    if device.compute_capability < FP8_CAPABILITY:
        raise InputError(
            f"{path} has an fp8 cache, which TensorRT takes from compute capability 8.9 on; {device.name} has "
            f"{device.compute_capability / 10:.1f}: export the model again with --kv-dtype int8"
        )


def _obstacle() -> str | None:
    """Return the reason why attention nodes cannot become the plugin; None if they can."""
    try:
        library_path("tensorrt")
    except SharpError as error:
        return str(error)
    return None


def flag_as_int32(model: onnx.ModelProto) -> None:
    """Pass `collect_stats` to plugins as int32, in place, because TensorRT does not document bool inputs of plugins.

    Raises:
        InputError: `collect_stats` is not an input of the model.
    """
    indices = {definition.name: definition.input_names.index("collect_stats") for definition in schema.OPS}
    casts: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        index = indices.get(node.op_type) if node.domain == schema.DOMAIN else None
        if index is not None and len(node.input) > index and node.input[index]:
            flag = node.input[index]
            as_int32 = f"{flag}.int32"
            casts[flag] = onnx.helper.make_node("Cast", [flag], [as_int32], to=onnx.TensorProto.INT32)
            node.input[index] = as_int32
    if unknown := set(casts) - {value.name for value in model.graph.input}:
        raise InputError(f"the model computes {', '.join(sorted(unknown))}, but collect_stats must be an input")
    for cast in casts.values():
        model.graph.node.insert(0, cast)
