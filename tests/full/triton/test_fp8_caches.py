"""fp8 caches of the Triton kernels, interpreted, agree with the float64 reference."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharp.plugins.op import e4m3
from sharp.plugins.op.schema import NORMALIZERS
from tests.full.triton.interpreted import CACHES, DATA, Run
from tests.full.triton.test_kernels import DTYPES, MIXED, assert_close, assert_int8_agrees, cases, rounded
from tests.plugins.conformance.cases import Case, Shape, fp8_case, make_case, run_reference

STORED = ("key_cache", "value_cache", "key_scale", "value_scale")


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_an_fp8_cache(run: Run, normalizer: str) -> None:
    case = fp8_case(make_case(normalizer, MIXED, seed=7))
    assert_int8_agrees(run(case, cache_dtype="fp8"), run_reference(case), case)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases(), collect=st.booleans())
def test_random_calls(run: Run, case: Case, collect: bool) -> None:
    if case.ties:  # numbers of 4 bits, whose logits are not exact
        case = dataclasses.replace(case, ties=False, attributes=case.attributes | {"scale": 0.125})
    case = fp8_case(case.with_inputs(collect_stats=np.array(collect)))
    assert_int8_agrees(run(case, cache_dtype="fp8"), run_reference(case), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "entmax"])
def test_16_bit_models(run: Run, normalizer: str, dtype: str) -> None:
    case = fp8_case(rounded(make_case(normalizer, MIXED, seed=7), DATA, dtype))
    actual, expected = run(case, dtype, "fp8"), run_reference(case)
    assert_close(actual, case, dtype)
    np.testing.assert_array_equal(actual.key_scale, expected.key_scale)
    np.testing.assert_array_equal(actual.value_scale, expected.value_scale)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("drop_slots", [False, True])
def test_a_cache_is_written_as_token_by_token(run: Run, block_size: int, drop_slots: bool) -> None:
    # Several tokens raise a block's scale one after the other; blocks begin in the middle of a chunk and before it.
    lengths = ((0, 37), (5, 1), (30, 20), (64, 64))
    shape = Shape(sequences=lengths, kv_heads=2, group=1, block_size=block_size, drop_slots=drop_slots)
    case = make_case("softmax", shape, seed=8)
    growing = case.inputs["key"] * np.geomspace(1e-3, 30, len(case.inputs["key"]), dtype=np.float32)[:, None, None]
    case = fp8_case(case.with_inputs(key=growing))
    assert_int8_agrees(run(case, cache_dtype="fp8"), run_reference(case), case)


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 1e-30, 0.7, 3e38, np.inf, np.nan, -1.0])
def test_the_bytes_are_the_reference_s_whatever_the_cache_held(run: Run, scale: float) -> None:
    case = make_case("softmax", Shape(sequences=((7, 25),), kv_heads=1, group=1))
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
    actual = run(case, cache_dtype="fp8")
    for field in STORED:
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field))


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_every_byte_of_a_value_is_its_number(run: Run, dtype: str) -> None:
    # Each value has one key, which is already in the cache.
    values = np.zeros((1, 1, 16, 256), np.uint8)
    values[0, 0, 0] = np.arange(256)
    inputs = {
        "query": np.ones((1, 1, 16), np.float32),
        "key": np.zeros((1, 1, 16), np.float32),
        "value": np.zeros((1, 1, 256), np.float32),
        "key_cache": np.zeros((1, 1, 16, 16), np.uint8),
        "value_cache": values,
        "slot_mapping": np.int32([-1]),
        "block_table": np.int32([[0]]),
        "query_start": np.int32([0, 1]),
        "context_lens": np.int32([0]),
        "key_scale": np.ones((1, 1), np.float32),
        "value_scale": np.full((1, 1), 0.25, np.float32),
    }
    output = run(Case("softmax", inputs, {"scale": 1.0}), dtype, "fp8").output
    np.testing.assert_array_equal(output[0, 0], e4m3.decode(np.arange(256, dtype=np.uint8)) / 4)
