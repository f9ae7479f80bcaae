"""TensorRT-RTX builds an engine from the function body of every normalizer, for a GPU that need not be there."""

import pytest

from sharp.plugins.ops.schema import NORMALIZERS
from tests.conformance.cases import Shape, make_case, make_model
from tests.tensorrt_rtx import build_engine


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_engine_build(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((3, 2),), head_dim=8, value_dim=8), alibi=normalizer == "softmax")
    engine = build_engine(make_model(case))
    assert engine is not None and engine.nbytes > 0
