"""TensorRT-RTX builds an engine from the function body of every normalizer, for a GPU that need not be there."""

from typing import Any

import onnx
import pytest

from sharp.plugins.ops.schema import NORMALIZERS
from tests.conformance.cases import Shape, make_case, make_model

trt: Any = pytest.importorskip("tensorrt_rtx_bindings", reason="the TensorRT-RTX bindings are not installed")

RANGES = {
    "tokens": (1, 16, 64),
    "blocks": (4, 32, 64),
    "sequences": (1, 2, 4),
    "bounds": (2, 3, 5),
    "max_blocks": (1, 4, 8),
}


@pytest.fixture(scope="module")
def logger() -> Any:
    return trt.Logger(trt.Logger.ERROR)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_engine_build(normalizer: str, logger: Any) -> None:
    case = make_case(normalizer, Shape(sequences=((3, 2),), head_dim=8, value_dim=8), alibi=normalizer == "softmax")
    engine = _build(make_model(case), logger)
    assert engine is not None and engine.nbytes > 0


def _build(model: onnx.ModelProto, logger: Any) -> Any:
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), [parser.get_error(i).desc() for i in range(parser.num_errors)]
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
