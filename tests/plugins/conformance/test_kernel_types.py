"""The CPU kernel for every pair of types T and C: inputs are rounded first, and the arithmetic after is checked."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import assume, given
from onnx import helper

from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.op.schema import NORMALIZERS, OUTPUTS, SCALES
from tests.plugins.conformance.cases import (
    Case,
    Shape,
    assert_agrees,
    cases,
    int8_case,
    make_case,
    make_model,
    run_reference,
    session,
)

CACHES = ("key_cache", "value_cache")
BESIDE_OUT = tuple(f"{name}_out" for name in SCALES)
COMPUTED = ("query", "key", "value")
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ONNX_TYPES = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
SHAPES = {
    "decode": Shape(sequences=((70, 1), (0, 5), (33, 2)), head_dim=16, value_dim=24),
    "prompt": Shape(sequences=((40, 50),), kv_heads=1, head_dim=21, value_dim=20, holes=True),
    "wide prompt": Shape(
        sequences=((70, 40), (0, 33)), kv_heads=2, head_dim=64, value_dim=80, block_size=32, holes=True
    ),
    "odd blocks": Shape(sequences=((40, 3),), block_size=5, drop_slots=True),
    "split": Shape(sequences=((4500, 1),), kv_heads=1, head_dim=16, value_dim=16),
}


def rounded(case: Case, names: tuple[str, ...], dtype: str) -> Case:
    """Return the case with the inputs `names` rounded to `dtype` and stored as float32."""
    return case.with_inputs(**{name: case.inputs[name].astype(DTYPES[dtype]).astype(np.float32) for name in names})


def with_casts(case: Case, types: dict[str, str]) -> onnx.ModelProto:
    """Return a model with float32 inputs and outputs around a node whose inputs in `types` have other types."""
    model = int8_model(case) if SCALES[0] in case.inputs else make_model(case)
    graph, node = model.graph, model.graph.node[0]
    del model.functions[:]  # the function's body is float32 throughout
    before, after = [], []
    for position, name in enumerate(node.input):
        if name in types:
            node.input[position] = f"{name}_cast"
            before.append(helper.make_node("Cast", [name], [f"{name}_cast"], to=ONNX_TYPES[types[name]]))
    produced = {"output": "query", "key_cache_out": "key_cache", "value_cache_out": "value_cache"}
    for position, name in enumerate(OUTPUTS):
        if produced.get(name) in types:
            node.output[position] = f"{name}_cast"
            after.append(helper.make_node("Cast", [f"{name}_cast"], [name], to=onnx.TensorProto.FLOAT))
    nodes = [*before, node, *after]
    copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return model


def run_with_cache(case: Case, dtype: str) -> tuple[AttentionOutput, AttentionOutput]:
    """Return the outputs of the kernel and of the reference, with caches rounded to `dtype`."""
    with np.errstate(invalid="ignore"):
        case = rounded(case, CACHES, dtype)
        in_dtype = {name: case.inputs[name].astype(DTYPES[dtype]) for name in CACHES}
    loaded = session(with_casts(case, dict.fromkeys(CACHES, dtype)), kernel=True)
    actual = AttentionOutput(*loaded.run(list(OUTPUTS), case.inputs))
    return actual, run_reference(case.with_inputs(**in_dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_cache_of_16_bits(normalizer: str, dtype: str, shape: str) -> None:
    case = make_case(normalizer, SHAPES[shape], seed=5)
    assert_agrees(*run_with_cache(case, dtype), case, tolerance=2e-5)


@given(case=cases())
def test_random_calls_with_a_bfloat16_cache(case: Case) -> None:
    assert_agrees(*run_with_cache(case, "bfloat16"), case, tolerance=2e-5)


@given(case=cases())
def test_random_calls_with_an_int8_cache(case: Case) -> None:
    # Whole-number logits that should cancel to 0 cancel only nearly with an int8 cache, and often do.
    assume(not (case.ties and case.normalizer in ("relu", "relu2", "softpick")))
    case = int8_case(case)
    actual = AttentionOutput(*session(int8_model(case), kernel=True).run([*OUTPUTS, *BESIDE_OUT], case.inputs))
    # The scales of a cache make even logits of whole numbers inexact: float32 rounds a logit of 1,000 by 6e-5.
    largest = case.attributes["scale"] * 9 * case.inputs["query"].shape[2] if case.ties else 0.0
    assert_agrees(actual, run_reference(case), case, tolerance=2e-5 + np.finfo(np.float32).eps * largest)


PROMPT = Shape(sequences=((100, 30),), kv_heads=1, group=3, head_dim=64, value_dim=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "adaptive_softmax", "entmax"])
def test_a_stored_key_that_is_no_number_spoils_the_rows_that_see_it(normalizer: str, number: float, dtype: str) -> None:
    case = make_case(normalizer, PROMPT)
    table, cache = case.inputs["block_table"], case.inputs["key_cache"].copy()
    cache[table[0, 10 // 16], :, :, 10 % 16] = number
    actual, _ = run_with_cache(case.with_inputs(key_cache=cache, query=np.abs(case.inputs["query"]) + 0.1), dtype)
    assert np.isnan(actual.output).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", ["softmax", "adaptive_softmax", "entmax"])
def test_a_stored_key_of_minus_infinity_has_no_weight(normalizer: str, dtype: str) -> None:
    case = make_case(normalizer, PROMPT)
    table, cache = case.inputs["block_table"], case.inputs["key_cache"].copy()
    query = np.abs(case.inputs["query"]) + 0.1
    far, infinite = cache.copy(), cache.copy()
    far[table[0, 10 // 16], :, :, 10 % 16] = -1e4
    infinite[table[0, 10 // 16], :, :, 10 % 16] = -np.inf
    expected, _ = run_with_cache(case.with_inputs(key_cache=far, query=query), dtype)
    actual, _ = run_with_cache(case.with_inputs(key_cache=infinite, query=query), dtype)
    np.testing.assert_allclose(actual.output, expected.output, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [np.nan, np.inf, 3.4e38])
def test_a_query_that_is_no_number_spoils_its_row_only(number: float, dtype: str) -> None:
    case = make_case("softmax", PROMPT)
    query = case.inputs["query"].copy()
    query[11] = number
    with np.errstate(invalid="ignore"):
        actual, _ = run_with_cache(case.with_inputs(query=query), dtype)
    _, expected = run_with_cache(case, dtype)
    rest = np.arange(len(query)) != 11
    np.testing.assert_allclose(actual.output[rest], expected.output[rest], atol=2e-5)
    assert np.isnan(actual.output[11]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", ["softmax", "adaptive_softmax"])
def test_a_value_that_is_nan_reaches_only_the_rows_that_see_it(normalizer: str, dtype: str) -> None:
    case = make_case(normalizer, PROMPT)
    value = case.inputs["value"].copy()
    value[20] = np.nan
    actual, _ = run_with_cache(case.with_inputs(value=value), dtype)
    _, expected = run_with_cache(case, dtype)
    np.testing.assert_allclose(actual.output[:20], expected.output[:20], atol=2e-5)
    assert np.isnan(actual.output[20:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax"])
def test_every_tensor_of_16_bits(normalizer: str, dtype: str) -> None:
    case = rounded(make_case(normalizer, SHAPES["decode"]), (*CACHES, *COMPUTED), dtype)
    loaded = session(with_casts(case, dict.fromkeys((*CACHES, *COMPUTED), dtype)), kernel=True)
    output = loaded.run(["output"], case.inputs)[0]
    expected = run_reference(case).output.astype(DTYPES[dtype]).astype(np.float32)
    # The tolerance is one unit in the last place, because the float32 result may round to the other side.
    np.testing.assert_allclose(output, expected, rtol=1e-3 if dtype == "float16" else 8e-3, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_an_int8_cache(normalizer: str, shape: str) -> None:
    case = int8_case(make_case(normalizer, SHAPES[shape], seed=7))
    loaded = session(int8_model(case), kernel=True)
    actual = AttentionOutput(*loaded.run([*OUTPUTS, *BESIDE_OUT], case.inputs))
    expected = run_reference(case)
    assert_agrees(actual, expected, case, tolerance=2e-5)
    np.testing.assert_array_equal(actual.key_scale, expected.key_scale)
    np.testing.assert_array_equal(actual.value_scale, expected.value_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax"])
def test_an_int8_cache_of_16_bit_models(normalizer: str, dtype: str) -> None:
    case = int8_case(rounded(make_case(normalizer, SHAPES["decode"], seed=7), COMPUTED, dtype))
    loaded = session(with_casts(case, dict.fromkeys(COMPUTED, dtype)), kernel=True)
    actual = AttentionOutput(*loaded.run([*OUTPUTS, *BESIDE_OUT], case.inputs))
    expected = run_reference(case)
    output = expected.output.astype(DTYPES[dtype]).astype(np.float32)
    np.testing.assert_allclose(actual.output, output, rtol=1e-3 if dtype == "float16" else 8e-3, atol=1e-5)
    for field in ("key_cache", "value_cache", "key_scale", "value_scale"):
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field))


def test_an_int8_cache_that_is_written_token_by_token_stays_close() -> None:
    # Every larger token rounds its block once more. The errors add up to at most three times half a step of the last
    # scale.
    case = int8_case(make_case("softmax", Shape(sequences=((0, 64),), kv_heads=1, group=1)))
    loaded = session(int8_model(case), kernel=True)
    names = [*OUTPUTS, *BESIDE_OUT]
    result = AttentionOutput(*loaded.run(names, case.inputs))
    assert result.key_scale is not None
    keys = result.key_cache * result.key_scale[:, :, None, None]
    for token, slot in enumerate(case.inputs["slot_mapping"]):
        block, offset = divmod(int(slot), 16)
        error = np.abs(keys[block, 0, :, offset] - case.inputs["key"][token, 0]).max()
        assert error <= 1.5 * result.key_scale[block, 0]


@pytest.mark.parametrize("token", [0, 5])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_number_that_an_int8_cache_cannot_hold_spoils_its_block(name: str, number: float, token: int) -> None:
    case = int8_case(make_case("softmax", Shape(sequences=((0, 20),), kv_heads=1, group=1)))
    numbers = case.inputs[name].copy()
    numbers[token, 0, 2] = number
    case = case.with_inputs(**{name: numbers})
    actual = AttentionOutput(*session(int8_model(case), kernel=True).run([*OUTPUTS, *BESIDE_OUT], case.inputs))
    with np.errstate(invalid="ignore"):
        expected = run_reference(case)
    assert np.isnan(actual.output[token:]).all()
    for field in ("key_cache", "value_cache", "key_scale", "value_scale"):
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field))


def int8_model(case: Case) -> onnx.ModelProto:
    inputs = {name: array for name, array in case.inputs.items() if name not in SCALES}
    model = make_model(replace(case, inputs=inputs))
    del model.functions[:]
    node = model.graph.node[0]
    node.input.extend(SCALES)
    node.output.extend(f"{name}_out" for name in SCALES)
    for name in SCALES:
        model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
        model.graph.output.append(helper.make_tensor_value_info(f"{name}_out", onnx.TensorProto.FLOAT, None))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.removesuffix("_out") in CACHES:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    return model
