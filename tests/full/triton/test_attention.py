"""Op Attention by the Triton kernels, interpreted, agrees with the float64 reference."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from sharp.plugins.op.schema import NORMALIZERS
from tests.full.triton.interpreted import DATA, PASTS, Run
from tests.plugins.conformance.attention_cases import FORMS, Case, Shape, assert_agrees, cases, make_case, run_reference

SHAPES: dict[str, Any] = {
    "decode": {"queries": 1, "new_keys": 1},
    "chunk": {"queries": 9, "new_keys": 9},
    "cross": {"queries": 3, "new_keys": 40},  # few queries, which the decode kernels compute
}


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_random_calls(run_attention: Run, case: Case) -> None:
    assert_agrees(run_attention(case), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_every_form(run_attention: Run, normalizer: str, form: Any, shape: str) -> None:
    sizes = Shape(form, **SHAPES[shape], past=0 if form == "none" else 90, group=2, head_dim=16, padded=True)
    case = make_case(normalizer, sizes, seed=4, alibi=True)
    assert_agrees(run_attention(case), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_one_query_over_many_keys_is_split_and_merged(run_attention: Run, normalizer: str, causal: int) -> None:
    shape = Shape(batch=2, queries=1, new_keys=1101, kv_heads=1, group=2, head_dim=16, value_dim=16, padded=True)
    case = make_case(normalizer, shape, causal=causal)
    assert_agrees(run_attention(case), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize(("causal", "collect"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "relu", "adaptive_softmax", "entmax"])
def test_the_keys_of_few_prompts_are_split(run_attention: Run, normalizer: str, causal: int, collect: bool) -> None:
    shape = Shape(batch=2, queries=9, new_keys=301, kv_heads=2, group=2, head_dim=16, value_dim=16, padded=True)
    case = make_case(normalizer, shape, causal=causal).with_inputs(collect_stats=np.array(collect))
    assert_agrees(run_attention(case, part_keys=64), run_reference(case), case, tolerance=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_16_bits(run_attention: Run, form: Any, dtype: str) -> None:
    case = make_case("entmax", Shape(form, past=0 if form == "none" else 40, group=2, head_dim=16, value_dim=16))
    kind = np.dtype(np.float16) if dtype == "float16" else np.dtype(ml_dtypes.bfloat16)
    rounded = {
        name: case.inputs[name].astype(kind).astype(np.float32) for name in (*DATA, *PASTS) if name in case.inputs
    }
    case = case.with_inputs(**rounded)
    actual, expected = run_attention(case, dtype), run_reference(case)
    unit = 2.0**-10 if dtype == "float16" else 2.0**-7
    np.testing.assert_allclose(actual.output, expected.output, rtol=unit, atol=unit * np.abs(expected.output).max())
    np.testing.assert_array_equal(actual.present_key, expected.present_key.astype(np.float32))
    np.testing.assert_array_equal(actual.present_value, expected.present_value.astype(np.float32))


@pytest.mark.parametrize("lens", [-5, 88, 2**31 - 1])
def test_lengths_that_the_host_cannot_see_stay_inside_the_buffer(run_attention: Run, lens: int) -> None:
    # A CPU kernel refuses these lengths. A GPU's kernels write the keys that fit, and touch nothing beside the buffer.
    case = make_case("softmax", Shape("shared", past=90, head_dim=16))
    buffers = {name: np.zeros_like(case.inputs[name]) for name in PASTS}
    wrong = case.with_inputs(past_lens=np.full(2, lens, np.int32), **buffers)
    result = run_attention(wrong)
    places = lens + np.arange(case.inputs["key"].shape[2])
    fits = (places >= 0) & (places < 90) & (lens < 2**30)
    np.testing.assert_array_equal(result.present_key[:, :, places[fits]], case.inputs["key"][:, :, fits])
    assert np.count_nonzero(result.present_key.any(axis=(1, 3))[0]) == fits.sum()


def test_without_statistics_they_are_zeros(run_attention: Run) -> None:
    case = make_case("ssa", Shape(queries=4, new_keys=4, head_dim=16))
    off = run_attention(case.with_inputs(collect_stats=np.array(False)))
    np.testing.assert_allclose(off.output, run_attention(case).output, rtol=1e-6, atol=1e-7)
    assert not off.stats.any()
