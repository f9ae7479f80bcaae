"""Caches in fp8 (e4m3) on the CPU agree with the float64 reference, which decodes the bytes exactly."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import assume, given
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from sharp.core.errors import InputError
from sharp.plugins.op import e4m3
from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.op.schema import NORMALIZERS, OUTPUTS
from sharp.plugins.op.torch_paged_attention import paged_attention
from tests.plugins.conformance.cases import (
    Case,
    Shape,
    assert_agrees,
    cases,
    fp8_case,
    make_case,
    run_reference,
    session,
)
from tests.plugins.conformance.test_kernel_types import (
    BESIDE_OUT,
    CACHES,
    COMPUTED,
    DTYPES,
    SHAPES,
    int8_model,
    rounded,
    with_casts,
)

STORED = ("key_cache", "value_cache", "key_scale", "value_scale")
BYTES = np.arange(256, dtype=np.uint8)


def of_fp8(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change the caches of an int8 model to fp8, and return the model."""
    for value in (*model.graph.input, *model.graph.output):
        if value.name.removesuffix("_out") in CACHES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT8E4M3FN
    return model


def run(case: Case, model: onnx.ModelProto | None = None) -> AttentionOutput:
    """Return the kernel's outputs, with caches as bytes.

    numpy has no fp8 numbers, so caches go in as values of ONNX Runtime.
    """
    feeds = {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.FLOAT8E4M3FN)
        if name in CACHES
        else array
        for name, array in case.inputs.items()
    }
    loaded = session(of_fp8(model or int8_model(case)), kernel=True)
    return AttentionOutput(*loaded.run([*OUTPUTS, *BESIDE_OUT], feeds))


def assert_stored_alike(actual: AttentionOutput, expected: AttentionOutput) -> None:
    for field in STORED:
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_an_fp8_cache(normalizer: str, shape: str) -> None:
    case = fp8_case(make_case(normalizer, SHAPES[shape], seed=7))
    actual, expected = run(case), run_reference(case)
    assert_agrees(actual, expected, case, tolerance=2e-5)
    assert_stored_alike(actual, expected)


@given(case=cases())
def test_random_calls(case: Case) -> None:
    # Whole-number logits that should cancel to 0 cancel only nearly in fp8, and often do.
    assume(not (case.ties and case.normalizer in ("relu", "relu2", "softpick")))
    case = fp8_case(case)
    actual, expected = run(case), run_reference(case)
    largest = case.attributes["scale"] * 9 * case.inputs["query"].shape[2] if case.ties else 0.0
    assert_agrees(actual, expected, case, tolerance=2e-5 + np.finfo(np.float32).eps * largest)
    assert_stored_alike(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", ["softmax", "entmax"])
def test_16_bit_models(normalizer: str, dtype: str) -> None:
    case = fp8_case(rounded(make_case(normalizer, SHAPES["decode"], seed=7), COMPUTED, dtype))
    actual, expected = run(case, with_casts(case, dict.fromkeys(COMPUTED, dtype))), run_reference(case)
    output = expected.output.astype(DTYPES[dtype]).astype(np.float32)
    np.testing.assert_allclose(actual.output, output, rtol=1e-3 if dtype == "float16" else 8e-3, atol=1e-5)
    assert_stored_alike(actual, expected)


def one_key(**inputs: np.ndarray) -> Case:
    """Return a case in which each head has a query that sees one key, which already is in the cache."""
    heads = inputs["key_cache"].shape[1]
    given = {
        "key": np.zeros((1, *inputs["key_cache"].shape[1:3]), np.float32),
        "value": np.zeros((1, heads, inputs["value_cache"].shape[3]), np.float32),
        "slot_mapping": np.int32([-1]),
        "block_table": np.int32([[0]]),
        "query_start": np.int32([0, 1]),
        "context_lens": np.int32([0]),
        "collect_stats": np.array(False),
        "key_scale": np.full((1, heads), 0.25, np.float32),
        "value_scale": np.full((1, heads), 4.0, np.float32),
    }
    return Case("softmax", {**inputs, **given}, {"scale": 1.0})


def test_every_byte_of_a_value_is_the_number_that_torch_reads() -> None:
    values = np.zeros((1, 1, 16, 256), np.uint8)
    values[0, 0, 0] = BYTES
    case = one_key(
        query=np.ones((1, 1, 2), np.float32), key_cache=np.zeros((1, 1, 2, 16), np.uint8), value_cache=values
    )
    numbers = torch.from_numpy(BYTES).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(run(case).output[0, 0], 4 * numbers)


def test_every_byte_of_a_key_is_the_number_that_torch_reads() -> None:
    keys = np.zeros((1, 256, 1, 16), np.uint8)
    keys[0, :, 0, 0] = BYTES
    values = np.full((1, 256, 16, 1), e4m3.encode(np.float32([1]))[0], np.uint8)
    numbers = torch.from_numpy(BYTES).view(torch.float8_e4m3fn).float().numpy()
    for sign in (1, -1):
        case = one_key(query=np.full((1, 256, 1), sign, np.float32), key_cache=keys, value_cache=values)
        relu = Case("relu", case.inputs, case.attributes)
        np.testing.assert_array_equal(run(relu).output[0, :, 0], np.maximum(sign * numbers, 0))


def test_a_cache_that_is_written_token_by_token_rounds_a_number_once() -> None:
    # A larger token raises the scale of the tokens before it in its block. Only numbers below the scale's least
    # exponent are rounded again.
    case = make_case("softmax", Shape(sequences=((0, 64),), kv_heads=1, group=1))
    keys = case.inputs["key"] * np.exp2(np.arange(64) % 16 - 8).astype(np.float32)[:, None, None]
    case = fp8_case(case.with_inputs(key=keys))
    result = run(case)
    assert result.key_scale is not None
    stored = e4m3.decode(result.key_cache) * result.key_scale[:, :, None, None]  # type: ignore[arg-type]  # decode returns an array for an array
    rounded_again = 0
    for token, slot in enumerate(case.inputs["slot_mapping"]):
        block, offset = divmod(int(slot), 16)
        scale, held = result.key_scale[block, 0], stored[block, 0, :, offset]
        # the power that brings each token's numbers below 2
        power = np.exp2(np.floor(np.log2(np.abs(keys[token, 0]).max())))
        once = torch.from_numpy(keys[token, 0] / power * 128).to(torch.float8_e4m3fn).float().numpy() * power / 128
        normal = np.abs(keys[token, 0]) >= scale * 2.0**-6
        np.testing.assert_array_equal(held[normal], once[normal])
        assert np.abs(held - keys[token, 0])[~normal].max(initial=0) <= scale * 2.0**-9
        rounded_again += int((~normal).sum())
    assert rounded_again > 10


@pytest.mark.parametrize("token", [0, 5])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_number_that_is_not_finite_spoils_its_block(name: str, number: float, token: int) -> None:
    case = fp8_case(make_case("softmax", Shape(sequences=((0, 20),), kv_heads=1, group=1)))
    numbers = case.inputs[name].copy()
    numbers[token, 0, 2] = number
    case = case.with_inputs(**{name: numbers})
    actual = run(case)
    with np.errstate(invalid="ignore"):
        expected = run_reference(case)
    assert np.isnan(actual.output[token:]).all()
    assert_stored_alike(actual, expected)


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 1e-30, 0.7, 3e38, np.inf, np.nan, -1.0])
def test_nan_is_never_written_whatever_the_cache_held(scale: float) -> None:
    shape = Shape(sequences=((7, 25),), kv_heads=1, group=1)
    case = make_case("softmax", shape)
    generator = np.random.default_rng(3)
    extremes = np.float32([0, -0.0, 1e-45, -1e-38, 1e-6, 447, 448, 464, 480, -1e30, 3.4e38, np.inf, -np.inf, np.nan])
    for name in ("key", "value"):
        numbers = generator.choice(extremes, case.inputs[name].shape, p=[0.09] * 11 + [0.01 / 3] * 3)
        case = case.with_inputs(**{name: numbers})
    blocks = len(case.inputs["key_cache"])
    case = case.with_inputs(
        **{name: generator.integers(0, 256, case.inputs[name].shape, np.uint8) for name in CACHES},
        **{f"{kind}_scale": np.full((blocks, 1), scale, np.float32) for kind in ("key", "value")},
    )
    with np.errstate(all="ignore"):
        expected = run_reference(case)
    actual = run(case)
    assert_stored_alike(actual, expected)
    table = case.inputs["block_table"][0]
    for token in range(7, 32):
        block, offset = table[token // 16], token % 16
        assert (actual.key_cache[block, 0, :, offset] & 0x7F != 0x7F).all()
        assert (actual.value_cache[block, 0, offset] & 0x7F != 0x7F).all()


@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "adaptive_softmax", "entmax"])
@pytest.mark.parametrize("queries", [1, 30])
def test_a_stored_nan_spoils_the_rows_that_see_it(normalizer: str, queries: int) -> None:
    case = fp8_case(make_case(normalizer, Shape(sequences=((100, queries),), kv_heads=1, group=3, head_dim=64)))
    cache = case.inputs["key_cache"].copy()
    cache[case.inputs["block_table"][0, 0], :, 3, 10] = 0xFF
    assert np.isnan(run(case.with_inputs(key_cache=cache)).output).all()


def test_a_value_that_is_nan_and_has_no_weight_contributes_nothing() -> None:
    case = fp8_case(make_case("entmax", Shape(sequences=((200, 3),), kv_heads=1, group=2, head_dim=16)))
    case = case.with_inputs(query=5 * case.inputs["query"])
    expected, values = run_reference(case), case.inputs["value_cache"].copy()
    table = case.inputs["block_table"][0]
    lone = [  # positions of values that no row needs, so that reference and kernel must both leave them out
        position
        for position in range(200)
        if np.isfinite(run_reference(case.with_inputs(value_cache=spoilt(values, table, position))).output).all()
    ]
    assert len(lone) > 100
    for position in lone[::7]:
        values = spoilt(values, table, position)
    np.testing.assert_allclose(run(case.with_inputs(value_cache=values)).output, expected.output, atol=1e-5)


def spoilt(values: np.ndarray, table: np.ndarray, position: int) -> np.ndarray:
    """Return the value cache with NaN in all channels of the key at `position`."""
    spoilt = values.copy()
    spoilt[table[position // 16], :, position % 16] = 0x7F
    return spoilt


def test_the_reach_of_a_key_is_that_of_the_largest_number() -> None:
    # One key of 448 among zeros, 300 positions back on a slope of 1, has all the weight. Only the scale bounds how far
    # back keys can matter.
    keys = np.zeros((20, 1, 1, 16), np.uint8)
    keys[0, 0, 0, 0] = 0x7E
    values = np.full((20, 1, 16, 8), e4m3.encode(np.float32([1]))[0], np.uint8)
    values[0, 0, 0] = e4m3.encode(np.float32([2]))[0]
    one = one_key(query=np.ones((1, 1, 1), np.float32), key_cache=keys, value_cache=values)
    inputs = {
        "alibi_slopes": np.float32([1]),
        "block_table": np.arange(20, dtype=np.int32)[None],
        "context_lens": np.int32([300]),
        "key_scale": np.ones((20, 1), np.float32),
        "value_scale": np.ones((20, 1), np.float32),
    }
    case = Case("entmax", {**one.inputs, **inputs}, {"scale": 1.0})
    np.testing.assert_array_equal(run(case).output[0, 0], np.full(8, 2, np.float32))


def test_keys_beyond_reach_are_not_read() -> None:
    shape = Shape(sequences=((3000, 2),), kv_heads=2, group=2, head_dim=16, value_dim=16)
    case = fp8_case(make_case("entmax", shape, seed=2), raised=(1,))
    slopes = np.array([1.0, 0.5, 0.0, 0.0], np.float32)
    case = case.with_inputs(alibi_slopes=slopes, collect_stats=np.array(False))
    cache = case.inputs["key_cache"].copy()
    cache[case.inputs["block_table"][0, :100], 0] = 0x7F
    np.testing.assert_allclose(run(case.with_inputs(key_cache=cache)).output, run_reference(case).output, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_op_for_pytorch_refuses_a_cache_with_scales(dtype: torch.dtype) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in make_case("softmax").inputs.items()}
    for name in CACHES:
        given = tensors | {name: torch.zeros(tensors[name].shape).to(dtype)}
        with pytest.raises(InputError, match=f"{name} is {dtype}, whose scales the op for PyTorch does not take"):
            paged_attention(**given, normalizer="softmax", scale=1.0)


@pytest.mark.parametrize("missing", ["key_scale", "value_scale"])
def test_a_cache_without_a_scale_is_refused(missing: str) -> None:
    case = fp8_case(make_case("softmax"))
    with pytest.raises(InvalidArgument, match=rf"{missing} has shape \[0, 2\]; it must be \[blocks, kv_heads\]"):
        run(case.with_inputs(**{missing: np.zeros((0, 2), np.float32)}))


def test_an_fp8_cache_has_no_key_screen() -> None:
    case = fp8_case(make_case("entmax"))
    model = int8_model(case)
    model.graph.node[0].input.append("key_screen")
    model.graph.node[0].output.append("key_screen_out")
    model.graph.input.append(helper.make_tensor_value_info("key_screen", TensorProto.INT8, None))
    blocks = len(case.inputs["key_cache"])
    screen = np.zeros((blocks, 2, 16 * (8 + 8)), np.int8)
    with pytest.raises(InvalidArgument, match="key_screen is given; only entmax over a cache of floats has one"):
        run(case.with_inputs(key_screen=screen), model)
