"""`ai.sharp::SharpAttention`: kernel, function body and torch op against the float64 reference."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from onnx import inliner
from onnx.reference import ReferenceEvaluator

from sharp.core.errors import InputError
from sharp.plugins.op.attention_reference import ContiguousOutput
from sharp.plugins.op.schema import NORMALIZERS
from sharp.plugins.op.torch_attention import attention
from tests.plugins.conformance.attention_cases import (
    FORMS,
    OUTPUTS,
    Case,
    Shape,
    assert_agrees,
    cases,
    make_case,
    make_model,
    run,
    run_reference,
)
from tests.plugins.conformance.cases import session

TYPED = ("query", "key", "value", "past_key", "past_value")
SMALL = {form: Shape(form, queries=3, new_keys=3, past=9, group=2, head_dim=4, value_dim=4) for form in FORMS}


def _run_torch(case: Case) -> ContiguousOutput:
    tensors = {name: torch.tensor(array) for name, array in case.inputs.items()}
    attributes = {**case.attributes, "causal": bool(case.attributes.get("causal", 1))}
    return ContiguousOutput(
        *(result.numpy() for result in attention(**tensors, normalizer=case.normalizer, **attributes))
    )


@given(case=cases())
def test_kernel_on_random_calls(case: Case) -> None:
    assert_agrees(run(case, kernel=True), run_reference(case), case)


@settings(max_examples=settings().max_examples // 3)  # ONNX Runtime optimizes every body anew
@given(case=cases())
def test_body_on_random_calls_on_stock_onnx_runtime(case: Case) -> None:
    assert_agrees(run(case, kernel=False), run_reference(case), case)


@given(case=cases())
def test_torch_op_on_random_calls(case: Case) -> None:
    assert_agrees(_run_torch(case), run_reference(case), case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_inlined_in_the_onnx_reference_evaluator(normalizer: str, form: str) -> None:
    case = make_case(normalizer, SMALL[form], alibi=True, causal=0)
    model = make_model(case)
    onnx.checker.check_model(model, full_check=True)
    inlined = inliner.inline_local_functions(model)
    assert not inlined.functions
    result = ContiguousOutput(*ReferenceEvaluator(inlined).run(list(OUTPUTS), case.inputs))
    assert_agrees(result, run_reference(case), case)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "body"])
def test_long_context_and_one_query(kernel: bool) -> None:
    case = make_case("entmax", Shape(batch=2, queries=1, new_keys=5000, kv_heads=1, group=2, head_dim=16), causal=0)
    assert_agrees(run(case, kernel), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "body"])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_that_a_node_leaves_out(form: str, kernel: bool) -> None:
    case = make_case("ssa", SMALL[form])
    expected = run_reference(case)
    for outputs in (("output",), ("output", "stats"), ("output", "present_key", "present_value")):
        results = session(make_model(case, outputs), kernel).run(list(outputs), case.inputs)
        for name, result in zip(outputs, results, strict=True):
            np.testing.assert_allclose(result, getattr(expected, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "body"])
def test_statistics_are_zeros_unless_requested(kernel: bool) -> None:
    case = make_case("entmax", SMALL["none"])
    off = run(case.with_inputs(collect_stats=np.array(False)), kernel)
    assert not off.stats.any()
    np.testing.assert_array_equal(off.output, run(case, kernel).output)


def test_shared_buffer_is_updated_in_place_when_bound_so() -> None:
    case = make_case("softmax", SMALL["shared"])
    buffers = {name: case.inputs[f"past_{name}"].copy() for name in ("key", "value")}
    bound = session(make_model(case), kernel=True)
    binding = bound.io_binding()
    for name, array in case.inputs.items():
        binding.bind_cpu_input(name, buffers[name[5:]] if name in ("past_key", "past_value") else array)
    for name, buffer in buffers.items():
        binding.bind_output(f"present_{name}", "cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
    for name in ("output", "stats"):
        binding.bind_output(name)
    bound.run_with_iobinding(binding)
    expected = run_reference(case)
    np.testing.assert_array_equal(buffers["key"], expected.present_key.astype(np.float32))
    np.testing.assert_array_equal(buffers["value"], expected.present_value.astype(np.float32))


@pytest.mark.parametrize(("form", "new_keys"), [("shared", 3), ("concatenating", 0)])
def test_a_past_between_nodes_may_become_the_present(form: str, new_keys: int) -> None:
    # ONNX Runtime gives the present the memory of the past where both are declared with the same shape.
    case = make_case("softmax", replace(SMALL[form], new_keys=new_keys))
    model = make_model(case)
    graph, node = model.graph, onnx.NodeProto.FromString(model.graph.node[0].SerializeToString())
    del model.functions[:], graph.node[:]
    for kind in ("key", "value"):
        past, present = f"past_{kind}", f"present_{kind}"
        node.input[list(node.input).index(past)] += "_between"
        node.output[list(node.output).index(present)] += "_between"
        for name in (past, present):
            shape = case.inputs[past].shape
            graph.value_info.append(
                onnx.helper.make_tensor_value_info(f"{name}_between", onnx.TensorProto.FLOAT, shape)
            )
        graph.node.append(onnx.helper.make_node("Neg", [past], [f"{past}_between"]))
    graph.node.append(node)
    for name in ("present_key", "present_value"):
        graph.node.append(onnx.helper.make_node("Neg", [f"{name}_between"], [name]))
    negated = case.with_inputs(**{name: -case.inputs[name] for name in ("past_key", "past_value")})
    found = ContiguousOutput(*session(model, kernel=True).run(list(OUTPUTS), negated.inputs))
    found = replace(found, present_key=-found.present_key, present_value=-found.present_value)
    assert_agrees(found, run_reference(case), case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_tensor_of_16_bits(dtype: str, form: str) -> None:
    case = make_case("entmax", replace(SMALL[form], padded=form == "shared"))
    kind = np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    case = case.with_inputs(**{n: case.inputs[n].astype(kind).astype(np.float32) for n in case.inputs if n in TYPED})
    model = make_model(case)
    graph, node = model.graph, onnx.NodeProto.FromString(model.graph.node[0].SerializeToString())
    # without a function, only the kernel can compute the node between float32 inputs and outputs
    del model.functions[:]
    before, after = [], []
    for index, name in enumerate(node.input):
        if name in TYPED:
            node.input[index] += "_cast"
            before.append(
                onnx.helper.make_node("Cast", [name], [f"{name}_cast"], to=getattr(onnx.TensorProto, dtype.upper()))
            )
    for index, name in enumerate(node.output):
        if name != "stats":
            node.output[index] += "_cast"
            after.append(onnx.helper.make_node("Cast", [f"{name}_cast"], [name], to=onnx.TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend([*before, node, *after])
    result = ContiguousOutput(*session(model, kernel=True).run(list(OUTPUTS), case.inputs))
    expected = run_reference(case)
    rounded = expected.output.astype(kind).astype(np.float32)
    # The tolerance is one unit in the last place, because the float32 result may round to the other side.
    np.testing.assert_allclose(result.output, rounded, rtol=1e-3 if dtype == "float16" else 8e-3, atol=1e-5)
    assert_agrees(replace(result, output=expected.output), expected, case)


def test_alibi_falls_off_to_both_sides_without_causal() -> None:
    # With equal logits and values 0, 1, 2, the middle query weighs its neighbours alike, whatever the slope is.
    case = make_case("softmax", Shape(batch=1, queries=3, new_keys=3, kv_heads=1, group=1, value_dim=1), causal=0)
    case = case.with_inputs(
        query=np.zeros_like(case.inputs["query"]),
        value=np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1),
        alibi_slopes=np.array([2.0], np.float32),
    )
    e2, e4 = np.exp(-2.0), np.exp(-4.0)
    first = (e2 + 2 * e4) / (1 + e2 + e4)
    np.testing.assert_allclose(run_reference(case).output.ravel(), [first, 1.0, 2 - first], rtol=1e-12)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("shared", {"past_lens": [10, 0]}, r"past_lens\[0\] is 10; it must be from 0 to 9"),
        ("shared", {"past_lens": [0, 7]}, r"past_lens\[1\] is 7, and with 3 new keys .* the buffer's 9 slots"),
        ("none", {"total_lens": [-1, 0]}, r"total_lens\[0\] is -1; it must be 0 or more"),
        ("none", {"total_lens": [1]}, r"total_lens has shape \[1\]; it must be \[batch\] = \[2\]"),
        ("none", {"alibi_slopes": [1.0]}, r"alibi_slopes has shape \[1\]"),
    ],
)
def test_kernel_refuses_in_one_sentence(form: str, changes: dict[str, Any], message: str) -> None:
    case = make_case("softmax", SMALL[form])
    arrays = {
        name: np.array(value, np.float32 if name == "alibi_slopes" else np.int32) for name, value in changes.items()
    }
    changed = case.with_inputs(**arrays)
    model = make_model(changed)
    for value in model.graph.input:  # a wrong size must reach the kernel, not ONNX Runtime's check of shapes
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(Exception, match=message):
        session(model, kernel=True).run(None, changed.inputs)


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        ({}, {"normalizer": "hardmax"}, "one of"),
        ({}, {"normalizer": "ssa"}, "head_params"),
        ({}, {"normalizer": "entmax", "alpha": 1.0}, "a finite number above 1 for entmax"),
        ({"past_lens": torch.zeros(2, dtype=torch.int32)}, {"normalizer": "softmax"}, "given together"),
    ],
)
def test_torch_op_refuses(inputs: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
    tensors = {name: torch.tensor(array) for name, array in make_case("softmax").inputs.items()}
    with pytest.raises(InputError, match=message):
        attention(**tensors, **inputs, scale=1.0, **attributes)


@pytest.mark.parametrize("shape", [(0,), (0, 1)])
def test_statistics_are_not_collected_where_collect_stats_is_empty(shape: tuple[int, ...]) -> None:
    """An empty collect_stats turns statistics off. An empty tensor of two dimensions was once read beyond its end."""
    case = make_case("softmax", SMALL[FORMS[0]])
    model = make_model(case)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    inputs = {**case.inputs, "collect_stats": np.zeros(shape, bool)}
    assert not session(model, kernel=True).run(["stats"], inputs)[0].any()
