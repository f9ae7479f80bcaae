"""Build a TensorRT-RTX engine for a GPU that this machine need not have."""

from pathlib import Path
from typing import Any

import onnx
import pytest

trt: Any = pytest.importorskip("tensorrt_rtx_bindings", reason="the TensorRT-RTX bindings are not installed")

# The smallest, usual and largest value of every dynamic size.
RANGES = {
    "tokens": (1, 16, 64),
    "blocks": (4, 32, 64),
    "sequences": (1, 2, 4),
    "sequences_plus_1": (2, 3, 5),
    "max_blocks": (1, 4, 8),
    "outputs": (1, 2, 4),
    "batch": (1, 2, 4),
    "queries": (1, 8, 16),
    "new_keys": (1, 8, 16),
    "past": (16, 32, 64),
    "length": (1, 16, 64),
    "items": (1, 16, 64),
}


def build_engine(model: onnx.ModelProto, path: Path | None = None) -> Any:
    """Return the serialized engine for compute capability 8.9; `path` is the model's file, beside its external data."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(path)) if path else parser.parse(model.SerializeToString())
    assert parsed, [parser.get_error(i).desc() for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    for value in model.graph.input:
        dimensions = value.type.tensor_type.shape.dim
        if any(dimension.dim_param for dimension in dimensions):
            low, usual, high = (
                tuple(
                    RANGES[dimension.dim_param][i] if dimension.dim_param else dimension.dim_value
                    for dimension in dimensions
                )
                for i in range(3)
            )
            profile.set_shape(value.name, low, usual, high)
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)
