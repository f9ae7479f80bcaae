"""The function of standard ONNX ops agrees with the reference, so it can stand in where our kernel is missing."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from onnx import helper, inliner
from onnx.reference import ReferenceEvaluator

from sharp.core.errors import InputError
from sharp.plugins.op.function_body import FunctionForm, attach_function, make_function
from sharp.plugins.op.function_normalizers import MaskedLogits, normalize
from sharp.plugins.op.node_list import NodeList
from sharp.plugins.op.normalizers import entmax
from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.op.schema import NORMALIZERS, OUTPUTS
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, cases, make_case, make_model, run, run_reference

SMALL = Shape(sequences=((0, 3), (17, 2)), kv_heads=2, group=2, head_dim=4, value_dim=4)


@settings(max_examples=settings().max_examples // 3)  # ONNX Runtime optimizes every body anew
@given(case=cases())
def test_random_calls_on_stock_onnx_runtime(case: Case) -> None:
    assert_agrees(run(case, kernel=False), run_reference(case), case)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_inlined_in_the_onnx_reference_evaluator(normalizer: str) -> None:
    case = make_case(normalizer, SMALL, alibi=True, window=9)
    inlined = inliner.inline_local_functions(make_model(case))
    assert not inlined.functions
    result = AttentionOutput(*ReferenceEvaluator(inlined).run(list(OUTPUTS), case.inputs))
    assert_agrees(result, run_reference(case), case)


def test_as_a_function_in_the_onnx_reference_evaluator() -> None:
    case = make_case("softmax", SMALL)
    result = AttentionOutput(*ReferenceEvaluator(make_model(case)).run(list(OUTPUTS), case.inputs))
    assert_agrees(result, run_reference(case), case)


def test_float16_in_float16_out() -> None:
    case = make_case("entmax", SMALL)
    half = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in case.inputs.items()}
    model = make_model(case)
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT and value.name != "stats":
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    output = session.run(["output"], half)[0]
    assert output.dtype == np.float16
    np.testing.assert_allclose(output, run_reference(Case("entmax", half, case.attributes)).output, atol=2e-3)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
def test_entmax_newton_steps_reach_float32(alpha: float) -> None:
    session = _entmax_session()
    rng = np.random.default_rng(7)
    for count in (1, 2, 3, 17, 300, 4096):
        for logits in (
            rng.standard_normal(count),
            rng.standard_normal(count) * 10,
            rng.standard_normal(count) * 1e4,
            np.round(rng.standard_normal(count)),
            np.zeros(count),
            np.where(np.arange(count) % 3 == 0, 1e4, -1e4),
        ):
            row = logits.astype(np.float32)
            # The body rounds the scaled logits once to float32. The reference gets the same rounded logits.
            s = (np.float32(alpha) - np.float32(1)) * (row - row.max())
            expected = entmax(s.astype(np.float64) / (alpha - 1), alpha)
            actual = session.run(None, {"logits": row[None, None], "alpha": np.array(alpha, np.float32)})[0][0, 0]
            np.testing.assert_allclose(actual, expected, atol=5e-7 if alpha <= 2 else 2e-5, rtol=1e-4)


def test_nodes_of_different_forms_call_overloads_of_the_function() -> None:
    model = make_model(make_case("softmax", SMALL))
    other = onnx.NodeProto()
    other.CopyFrom(model.graph.node[0])
    other.attribute[[a.name for a in other.attribute].index("normalizer")].s = b"relu"
    model.graph.node.append(other)
    attach_function(model)
    calls = {
        (node.overload, attribute.s)
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "normalizer"
    }
    assert len(calls) == 2
    assert {function.overload for function in model.functions} == {overload for overload, _ in calls}


def test_attaching_twice_changes_nothing() -> None:
    model = make_model(make_case("softmax", SMALL, alibi=True))
    before = model.SerializeToString(deterministic=True)
    attach_function(model)
    assert model.SerializeToString(deterministic=True) == before


def test_function_refuses_what_it_cannot_write() -> None:
    with pytest.raises(InputError, match="ssa needs head_params"):
        make_function(FunctionForm("PagedAttention", "ssa", ()))
    with pytest.raises(InputError, match="it must be one of"):
        make_function(FunctionForm("PagedAttention", "hardmax", ()))
    with pytest.raises(InputError, match="must be given together"):
        make_function(FunctionForm("SharpAttention", "softmax", ("past_key",)))


def _entmax_session() -> ort.InferenceSession:
    """Return a session with the function body's entmax alone, in which alpha is an input instead of an attribute."""
    nodes = NodeList()
    count = nodes.op("Cast", nodes.unsqueeze(nodes.dimension("logits", 2), 1, 2), to=1)
    rows = MaskedLogits("logits", nodes.op("Cast", nodes.constant(1.0), to=9), count, "")
    result = normalize(nodes, rows, "entmax", ())
    body = [node for node in nodes.nodes if node.output[0] != "attribute_alpha"]
    for node in body:
        node.input[:] = ["alpha" if name == "attribute_alpha" else name for name in node.input]
    graph = helper.make_graph(
        body,
        "entmax",
        [
            helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["rows", "one", "keys"]),
            helper.make_tensor_value_info("alpha", onnx.TensorProto.FLOAT, []),
        ],
        [helper.make_tensor_value_info(result.weights, onnx.TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
