"""Engines of TensorRT, built on the GPU that they are for; attention over a paged cache is Sharp's plugin in them."""

from pathlib import Path
from typing import Any

import onnx
from rich.progress import Progress

from sharp.exporter.lowering import inline
from sharp.exporter.tensorrt_engine import Engine, build_engine, check_quantization
from sharp.plugins.engine_manifest import EngineLimits
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import Manifest
from sharp.plugins.ops import schema
from sharp.plugins.tensorrt.package import import_tensorrt, load_plugin

RUNTIME = "TensorRT"


def build(folder: Path, manifest: Manifest, limits: EngineLimits, timing_cache: Path, progress: Progress) -> Engine:
    """The engine of the model in `folder`, for this machine's GPU.

    A paged model keeps its attention nodes, which become the plugin of `libsharp_trt.so`, and gets two optimization
    profiles: one for steps that compute a token of each sequence, and one for all steps. Other models run on the
    standard ops of their function bodies. `timing_cache` is read if it is there, and written: it makes the next build
    faster.

    Raises:
        InputError: TensorRT cannot read the model, or the plugin lacks what its cache needs.
        SharpError: TensorRT or the plugin is missing, or the engine could not be built.
    """
    trt = import_tensorrt(", or build for --backend tensorrt-rtx, which needs neither GPU nor plugin")
    path = folder / manifest.model_file
    check_quantization(path, manifest, RUNTIME)
    if manifest.cache.beside:
        raise InputError(
            f"{path} has an {manifest.cache.dtype} cache, which the TensorRT plugin does not have; export the model "
            "again with another --kv-dtype"
        )
    model = onnx.load(path, load_external_data=False)
    plugin = None
    if manifest.cache.form == "paged" and manifest.target != "portable":
        # TensorRT 10's parser takes the function's body where there is one, later ones take the plugin.
        del model.functions[:]
        _flag_as_int32(model)
        plugin = load_plugin(trt)
    elif model.functions:
        model = inline(model)  # its parser takes a node Attention of any domain for ONNX's own
    kept: list[Any] = []

    def configure(config: Any) -> None:
        if plugin:
            # Without it the plugin copies the whole cache in every step.
            config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        cache = config.create_timing_cache(timing_cache.read_bytes() if timing_cache.is_file() else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            raise InputError(f"{timing_cache} is not a timing cache of TensorRT {trt.__version__}; remove it")
        kept.append(config)

    name = Path(plugin).name if plugin else None
    decode = limits.model_copy(update={"tokens": limits.sequences})
    profiles = (decode, limits) if manifest.cache.form == "paged" and limits.tokens > limits.sequences else (limits,)
    engine = build_engine(trt, RUNTIME, model, folder, manifest, profiles, configure, progress, plugin=name)
    timing_cache.write_bytes(bytes(kept[0].get_timing_cache().serialize()))
    return engine


def _flag_as_int32(model: onnx.ModelProto) -> None:
    """Give the plugin `collect_stats` as int32: TensorRT does not say that a plugin may have inputs of bool."""
    place = schema.INPUTS.index("collect_stats")
    casts: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        if node.op_type == schema.PAGED_ATTENTION.name and len(node.input) > place and node.input[place]:
            flag = node.input[place]
            as_int32 = f"{flag}.int32"
            casts[flag] = onnx.helper.make_node("Cast", [flag], [as_int32], to=onnx.TensorProto.INT32)
            node.input[place] = as_int32
    if unknown := set(casts) - {value.name for value in model.graph.input}:
        raise InputError(f"the model computes {', '.join(sorted(unknown))}, but collect_stats must be an input")
    for cast in casts.values():
        model.graph.node.insert(0, cast)
