"""Engines of TensorRT-RTX, built without a GPU: its builder compiles for any compute capability ahead of time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from sharp.exporter.lowering import inline
from sharp.plugins.errors import InputError, SharpError
from sharp.plugins.manifest import Manifest


@dataclass(frozen=True)
class Limits:
    """The largest sizes that an engine takes: sequences of a batch, new tokens of a step, tokens of one sequence."""

    sequences: int
    tokens: int
    context: int


def build_engine(folder: Path, manifest: Manifest, compute_capability: int, limits: Limits) -> bytes:
    """The serialized engine of the model in `folder`, for GPUs of this compute capability (89 is 8.9).

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
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    path = folder / manifest.model_file
    if manifest.quantization is not None:
        raise InputError(
            f"{path} is quantized to {manifest.quantization} with ONNX Runtime's own ops, which TensorRT-RTX does not "
            "have; export the model again without --quantize, and with --dtype float16 if it is to be smaller"
        )
    if manifest.target == "tensorrt":
        raise InputError(
            f"{path} was exported with --target tensorrt and needs a plugin, which TensorRT-RTX does not take; "
            "export the model again with --target portable"
        )
    model = onnx.load(path, load_external_data=False)
    if model.functions:
        model = inline(model)  # its parser takes a node Attention of any domain for ONNX's own
    if not parser.parse(model.SerializeToString(), str(path.resolve())):
        raise InputError(f"{path} cannot be read by TensorRT-RTX: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(capability, 0)
    config.add_optimization_profile(_profile(builder.create_optimization_profile(), model, _ranges(manifest, limits)))
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise SharpError(f"TensorRT-RTX could not build an engine from {path}; its messages are above")
    return bytes(engine)


def _ranges(manifest: Manifest, limits: Limits) -> Mapping[str, tuple[int, int, int]]:
    """The smallest, usual and largest value of every dynamic size, by its name in the graph."""
    block = manifest.cache.block_size
    blocks = -(-limits.context // block)  # of one sequence
    all_blocks = blocks * limits.sequences

    def up_to(most: int, least: int = 1) -> tuple[int, int, int]:
        return least, max(least, most // 2), max(least, most)

    per_sequence = up_to(min(limits.tokens, limits.context))
    return {
        "batch": up_to(limits.sequences),
        "sequences": up_to(limits.sequences),
        "sequences_plus_1": (2, 1 + max(1, limits.sequences // 2), 1 + limits.sequences),
        "tokens": up_to(limits.tokens) if manifest.cache.form == "paged" else per_sequence,
        "outputs": up_to(limits.tokens),
        "blocks": up_to(all_blocks),
        "max_blocks": up_to(blocks),
        "past": up_to(limits.context, least=0),
        "length": per_sequence,
        "items": per_sequence,
    }


def _profile(profile: Any, model: onnx.ModelProto, ranges: Mapping[str, tuple[int, int, int]]) -> Any:
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        sizes = value.type.tensor_type.shape.dim
        if value.name in constants or not any(size.dim_param for size in sizes):
            continue
        bounds = [ranges[size.dim_param] if size.dim_param else (size.dim_value,) * 3 for size in sizes]
        profile.set_shape(value.name, *zip(*bounds, strict=True))  # smallest, usual and largest shape
    return profile
