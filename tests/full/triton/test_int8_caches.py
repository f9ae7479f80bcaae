"""int8 caches of the Triton kernels, interpreted, agree with the float64 reference."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharp.plugins.op.schema import NORMALIZERS
from tests.full.triton.interpreted import CACHES, DATA, Run
from tests.full.triton.test_kernels import DTYPES, MIXED, assert_close, assert_int8_agrees, cases, rounded
from tests.plugins.conformance.cases import Case, Shape, int8_case, make_case, run_reference


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_an_int8_cache(run: Run, normalizer: str) -> None:
    case = int8_case(make_case(normalizer, MIXED, seed=7))
    assert_int8_agrees(run(case, cache_dtype="int8"), run_reference(case), case)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases(), collect=st.booleans())
def test_random_calls_of_int8_caches(run: Run, case: Case, collect: bool) -> None:
    if case.ties:  # scales that are no powers of two, so that logits are not exact
        case = dataclasses.replace(case, ties=False, attributes=case.attributes | {"scale": 0.125})
    case = int8_case(case.with_inputs(collect_stats=np.array(collect)))
    assert_int8_agrees(run(case, cache_dtype="int8"), run_reference(case), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_an_int8_cache_of_16_bit_models(run: Run, normalizer: str, dtype: str) -> None:
    case = int8_case(rounded(make_case(normalizer, MIXED, seed=7), DATA, dtype))
    actual, expected = run(case, dtype, "int8"), run_reference(case)
    assert_close(actual, case, dtype)
    np.testing.assert_array_equal(actual.key_scale, expected.key_scale)
    np.testing.assert_array_equal(actual.value_scale, expected.value_scale)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_an_int8_cache_with_values_too_small_for_float16(run: Run, dtype: str, group: int) -> None:
    # A weight times its block's scale is 1e-9, for values as small, and for blocks with unlike scales.
    shape = Shape(sequences=((300, 1), (470, 9)), kv_heads=1, group=group, head_dim=16, value_dim=16)
    case = make_case("softmax", shape, seed=4)
    case = rounded(case, DATA, dtype) if dtype in DTYPES else case
    case = int8_case(case)
    sizes = 10.0 ** -np.random.default_rng(0).integers(3, 8, case.inputs["value_scale"].shape)
    case = case.with_inputs(value_scale=(case.inputs["value_scale"] * sizes).astype(np.float32))
    case = case.with_inputs(value=case.inputs["value"] * np.float32(0), collect_stats=np.array(False))
    actual, expected = run(case, dtype, "int8").output, run_reference(case).output
    unit = {"float32": 2e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    least = 2.0**-24 if dtype == "float16" else 0.0  # half of float16's smallest step
    assert np.abs(actual - expected).max() < unit * np.abs(expected).max() + least


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
@pytest.mark.parametrize("normalizer", ["softmax", "adaptive_softmax", "entmax"])
def test_huge_logits_of_an_int8_cache(run: Run, normalizer: str, dtype: str) -> None:
    # Scales of 1, which stay because the new keys hold 127, and whole numbers times 2^22, so that every logit is exact
    # in float32.
    shape = dataclasses.replace(MIXED, integers=True)
    case = make_case(normalizer, shape, seed=5, scale=2.0**22)
    query, key, value = (case.inputs[name].copy() for name in DATA)
    query[..., 0], key[..., 0], value[..., 0] = 0, 127, 127
    caches = {name: np.clip(np.nan_to_num(case.inputs[name]), -9, 9).astype(np.int8) for name in CACHES}
    ones = dict.fromkeys(("key_scale", "value_scale"), np.ones(caches["key_cache"].shape[:2], np.float32))
    case = case.with_inputs(**caches, **ones, query=query, key=key, value=np.rint(value))
    actual = run(case, dtype, "int8")
    if dtype == "float32":
        assert_int8_agrees(actual, run_reference(case), case)
    else:
        assert_close(actual, case, dtype)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("drop_slots", [False, True])
def test_an_int8_cache_is_written_as_token_by_token(run: Run, block_size: int, drop_slots: bool) -> None:
    # Several tokens raise a block's scale one after the other; blocks begin in the middle of a chunk and before it.
    lengths = ((0, 37), (5, 1), (30, 20), (64, 64))
    shape = Shape(sequences=lengths, kv_heads=2, group=1, block_size=block_size, drop_slots=drop_slots)
    case = int8_case(make_case("softmax", shape, seed=8))
    growing = case.inputs["key"] * np.linspace(0.1, 3, len(case.inputs["key"]), dtype=np.float32)[:, None, None]
    case = case.with_inputs(key=growing)
    assert_int8_agrees(run(case, cache_dtype="int8"), run_reference(case), case)


@pytest.mark.parametrize("token", [0, 5])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
def test_a_number_that_an_int8_cache_cannot_hold_spoils_its_block(
    run: Run, name: str, number: float, token: int
) -> None:
    case = int8_case(make_case("softmax", Shape(sequences=((0, 20),), kv_heads=1, group=1)))
    numbers = case.inputs[name].copy()
    numbers[token, 0, 2] = number
    case = case.with_inputs(**{name: numbers})
    actual = run(case, cache_dtype="int8")
    with np.errstate(invalid="ignore"):
        expected = run_reference(case)
    assert np.isnan(actual.output[token:]).all()
    for field in ("key_cache", "value_cache", "key_scale", "value_scale"):
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field))
