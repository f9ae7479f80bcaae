"""Prompts whose keys are split over programs where weights are known only after all keys have been seen."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharp.plugins.op.reference import AttentionOutput
from tests.full.triton import interpreted
from tests.full.triton.interpreted import CACHES, DATA, Run
from tests.full.triton.test_kernels import DTYPES, assert_close, assert_int8_agrees, cases, rounded
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, int8_case, make_case, run_reference
from tests.plugins.conformance.test_kernel_edges import with_key

SOLVED = ("adaptive_softmax", "entmax")
QUESTION = Shape(sequences=((470, 9),), kv_heads=1, group=3, head_dim=16, value_dim=16)
# The question beside sequences that decode, a sequence without a token, and a prompt as long as a part.
BESIDE = replace(QUESTION, sequences=((470, 9), (90, 1), (0, 0), (50, 14)))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases(SOLVED), part_keys=st.sampled_from((16, 33, 70)), collect=st.booleans())
def test_random_calls(run: Run, case: Case, part_keys: int, collect: bool) -> None:
    case = case.with_inputs(collect_stats=np.array(collect))
    assert_agrees(run(case, part_keys=part_keys), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
@pytest.mark.parametrize("normalizer", SOLVED)
def test_results_are_those_of_one_program(run: Run, normalizer: str, dtype: str) -> None:
    case = make_case(normalizer, BESIDE, seed=4, alibi=True, sinks=True, softcap=20.0)
    if dtype != "float32":
        case = rounded(case, (*DATA, *CACHES), dtype)
    split, whole = run(case, dtype, dtype, part_keys=64), run(case, dtype, dtype)
    unit = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(split.output, whole.output, rtol=unit, atol=unit * np.abs(whole.output).max())
    np.testing.assert_allclose(split.stats, whole.stats, rtol=1e-4, atol=1e-2 if normalizer == "entmax" else 1e-4)


@pytest.mark.parametrize("normalizer", SOLVED)
def test_int8_caches(run: Run, normalizer: str) -> None:
    case = int8_case(make_case(normalizer, BESIDE, seed=1, sinks=True))
    assert_int8_agrees(run(case, cache_dtype="int8", part_keys=64), run_reference(case), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalizer", SOLVED)
def test_huge_logits(run: Run, normalizer: str, dtype: str) -> None:
    # Whole numbers times 2^22: float32 has each logit exactly, but no threshold next to it.
    case = rounded(make_case(normalizer, replace(BESIDE, integers=True), scale=2.0**22), (*DATA, *CACHES), dtype)
    assert_close(run(case, dtype, dtype, part_keys=64), case, dtype)


@pytest.mark.parametrize("normalizer", SOLVED)
def test_equal_logits(run: Run, normalizer: str) -> None:
    case = make_case(normalizer, BESIDE)
    case = case.with_inputs(query=np.zeros_like(case.inputs["query"]))
    assert_agrees(run(case, part_keys=64), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize(
    ("normalizer", "window"), [*product(SOLVED, [40, 200]), ("adaptive_softmax", 0), ("adaptive_softmax", 1)]
)
def test_windows_leave_parts_and_rows_without_keys(run: Run, normalizer: str, window: int) -> None:
    case = make_case(normalizer, replace(BESIDE, holes=window == 200), window=window, sinks=True)
    assert_agrees(run(case, part_keys=16), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("normalizer", SOLVED)
def test_holes_only_give_zeros(run: Run, normalizer: str) -> None:
    case = make_case(normalizer, BESIDE)
    result = run(case.with_inputs(block_table=np.full_like(case.inputs["block_table"], -1)), part_keys=64)
    assert not result.output.any() and not result.stats.any()


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("normalizer", SOLVED)
def test_a_key_that_is_nan_or_infinite(run: Run, normalizer: str, number: float) -> None:
    # The outcome is NaN for a key in any part; rows whose window leaves the key out do not change.
    for position in (3, 200, 469):
        result = run(with_key(make_case(normalizer, QUESTION), position, number), part_keys=64)
        assert np.isnan(result.output).all() and np.isnan(result.stats).all()
    spoilt = with_key(make_case(normalizer, QUESTION, window=150), 200, np.nan)
    clean = make_case(normalizer, QUESTION, window=150).with_inputs(query=spoilt.inputs["query"])
    np.testing.assert_array_equal(run(spoilt, part_keys=64).output, run(clean, part_keys=64).output)


@pytest.mark.parametrize("normalizer", SOLVED)
def test_minus_infinity(run: Run, normalizer: str) -> None:
    spoilt = with_key(make_case(normalizer, QUESTION), 200, -np.inf)
    values = spoilt.inputs["value_cache"].copy()
    values[spoilt.inputs["block_table"][0, 200 // 16], :, 200 % 16] = 1e6  # would show in the output with any weight
    assert np.abs(run(spoilt.with_inputs(value_cache=values), part_keys=64).output).max() < 10
    # Rows that see only this key are NaN.
    alone = with_key(make_case(normalizer, QUESTION), 0, 0.0)
    keys = np.full_like(alone.inputs["key_cache"], -np.inf)
    key = np.full_like(alone.inputs["key"], -np.inf)
    assert np.isnan(run(alone.with_inputs(key_cache=keys, key=key), part_keys=64).output).all()


@pytest.mark.parametrize("normalizer", SOLVED)
def test_a_query_that_is_no_number_spoils_its_row_only(run: Run, normalizer: str) -> None:
    case = make_case(normalizer, replace(QUESTION, group=1))
    query = case.inputs["query"].copy()
    query[4] = np.nan
    result: AttentionOutput = run(case.with_inputs(query=query), part_keys=64)
    others = [row for row in range(9) if row != 4]
    np.testing.assert_allclose(result.output[others], run_reference(case).output[others], atol=1e-5)
    assert np.isnan(result.output[4]).all()


@pytest.mark.parametrize("form", attention_cases.FORMS)
@pytest.mark.parametrize("normalizer", SOLVED)
def test_contiguous_keys(run_attention: Run, normalizer: str, form: Any) -> None:
    shape = attention_cases.Shape(
        form, batch=2, queries=9, new_keys=9, past=0 if form == "none" else 300, group=2, head_dim=16, padded=True
    )
    case = attention_cases.make_case(normalizer, shape, seed=4, alibi=True, sinks=True)
    expected = attention_cases.run_reference(case)
    attention_cases.assert_agrees(run_attention(case, part_keys=64), expected, case, tolerance=2e-5)


@pytest.mark.parametrize(
    ("alpha", "dtype", "counts"),
    [(1.5, "float32", 1), (1.5, "float32", 9), (1.5, "bfloat16", 2), (1.2, "float16", 1), (2.0, "float32", 2)],
)
def test_steps_that_launches_are_too_few_for(
    interpreter: ProcessPoolExecutor, run: Run, alpha: float, dtype: str, counts: int
) -> None:
    # One program goes on alone, or further launches find no work: the thresholds do not depend on the number of
    # launches.
    case = make_case("entmax", BESIDE, seed=4, sinks=True, alpha=alpha)
    if dtype != "float32":
        case = rounded(case, (*DATA, *CACHES), dtype)
    found = interpreter.submit(interpreted.run_counts, case, dtype, 64, counts).result()
    usual = run(case, dtype, dtype, part_keys=64)
    np.testing.assert_allclose(found["output"], usual.output, rtol=2e-5, atol=2e-5 if dtype == "float32" else 2.0**-9)
    np.testing.assert_allclose(found["stats"], usual.stats, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("values", [(0, -0.49, -0.8, -2.12), (0, -1e-4, -0.3, -900.0)])
def test_thresholds_that_are_far_from_where_the_search_begins(
    run: Run, values: tuple[float, ...], alpha: float
) -> None:
    # Four values of logits, with more keys the lower the value; the values are different in each part of the keys.
    context = 640
    case = make_case(
        "entmax", Shape(sequences=((context, 5),), kv_heads=1, group=1, head_dim=16), scale=1.0, alpha=alpha
    )
    logits = np.sort(np.random.default_rng(1).choice(values, context, p=(0.005, 0.02, 0.2, 0.775)))
    keys, query = np.zeros_like(case.inputs["key_cache"]), np.zeros_like(case.inputs["query"])
    query[..., 0] = 1
    for position, logit in enumerate(logits):
        keys[case.inputs["block_table"][0, position // 16], 0, 0, position % 16] = logit
    case = case.with_inputs(query=query, key_cache=keys, key=np.full_like(case.inputs["key"], -9))
    expected = run_reference(case)
    found = run(case, part_keys=64)
    tolerance = 1e-5 if alpha <= 2 else 1e-3
    np.testing.assert_allclose(found.output, expected.output, atol=tolerance * np.abs(expected.output).max(), rtol=0)
    if alpha <= 2:
        np.testing.assert_allclose(found.stats, expected.stats, rtol=1e-4, atol=1e-4)
