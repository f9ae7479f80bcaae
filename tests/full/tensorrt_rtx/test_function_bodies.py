"""TensorRT-RTX builds an engine from the function body of every normalizer, for a GPU that this machine may lack."""

import pytest

from sharp.plugins.op.attributes import WITHOUT_SINK
from sharp.plugins.op.schema import NORMALIZERS
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Shape, make_case, make_model
from tests.tensorrt_rtx import build_engine


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_engine_build(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((3, 2),), head_dim=8, value_dim=8), alibi=normalizer == "softmax")
    engine = build_engine(make_model(case))
    assert engine is not None and engine.nbytes > 0


@pytest.mark.parametrize("normalizer", [name for name in NORMALIZERS if name not in WITHOUT_SINK])
def test_engine_build_with_sinks(normalizer: str) -> None:
    shape = Shape(sequences=((3, 2),), head_dim=8, value_dim=8)
    engine = build_engine(make_model(make_case(normalizer, shape, sinks=True)))
    assert engine is not None and engine.nbytes > 0


@pytest.mark.parametrize("form", attention_cases.FORMS)
def test_engine_build_of_the_interchange_op(form: str) -> None:
    shape = attention_cases.Shape(form, past=16, padded=True, head_dim=8, value_dim=8)
    model = attention_cases.make_model(attention_cases.make_case("entmax", shape, alibi=True))
    engine = build_engine(model)
    assert engine is not None and engine.nbytes > 0
