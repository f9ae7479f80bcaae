"""The CPU kernel agrees with the float64 reference.

`../test_instruction_sets.py` runs these tests again on other instruction sets.
"""

import numpy as np
import pytest
from hypothesis import given

from sharp.plugins.op.schema import NORMALIZERS, TEMPERATURE_PRESETS
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, cases, make_case, run, run_reference


@given(case=cases())
def test_random_calls(case: Case) -> None:
    assert_agrees(run(case, kernel=True), run_reference(case), case)


def test_sigmoid_weights_that_float32_does_not_have_are_zeros() -> None:
    shape = Shape(
        sequences=((0, 0), (130, 0), (150, 5)), kv_heads=1, group=2, head_dim=1, value_dim=1, block_size=32,
        drop_slots=True, holes=True,
    )  # fmt: skip
    case = make_case("sigmoid", shape, 1510, True, scale=1.5, causal=0)
    result = run(case, kernel=True)
    assert_agrees(result, run_reference(case), case)
    assert (result.output == 0).all() and (result.stats[..., 0] == 0).all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_long_context_is_split_over_threads_and_merged(normalizer: str) -> None:
    shape = Shape(sequences=((5000, 1), (2500, 2)), kv_heads=1, group=2, head_dim=16, value_dim=16, holes=True)
    case = make_case(normalizer, shape)
    result = run(case, kernel=True)
    assert_agrees(result, run_reference(case), case, tolerance=2e-5)
    single = run(case, kernel=True, threads=1)
    np.testing.assert_array_equal(result.output, single.output)  # the number of threads changes no bit
    np.testing.assert_array_equal(result.stats, single.stats)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_prompt_of_many_tiles(normalizer: str) -> None:
    shape = Shape(sequences=((70, 90), (0, 33)), kv_heads=1, group=3, head_dim=16, value_dim=16)
    case = make_case(normalizer, shape, seed=3, alibi=True)
    assert_agrees(run(case, kernel=True), run_reference(case), case)


@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_entmax_of_any_alpha(alpha: float) -> None:
    case = make_case("entmax", Shape(sequences=((900, 4),)), alpha=alpha)
    expected = run_reference(case)
    # float32 cannot hold a weight (s - tau)^(1 / (alpha - 1)) better when its exponent is below 1.
    tolerance = 1e-5 if alpha <= 2 else 2e-4
    scale = np.abs(expected.output).max()
    np.testing.assert_allclose(run(case, kernel=True).output, expected.output, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_statistics_are_zeros_and_the_output_is_the_same_without_collect_stats(normalizer: str) -> None:
    case = make_case(normalizer)
    off = run(case.with_inputs(collect_stats=np.array(False)), kernel=True)
    absent = run(
        Case(normalizer, {k: v for k, v in case.inputs.items() if k != "collect_stats"}, case.attributes), True
    )
    for result in (off, absent):
        assert not result.stats.any()
        np.testing.assert_allclose(result.output, run(case, kernel=True).output, rtol=1e-6)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "function body"])
def test_the_temperature_for_long_contexts(kernel: bool) -> None:
    """Float32 sums of the preset's large terms give the right beta of about 2.4 at entropies from 6.9 to 8.6 nats.

    The published polynomial has beta = 1 there.
    """
    shape = Shape(sequences=((1000, 2), (6000, 1)), kv_heads=1, group=2, head_dim=16, value_dim=8)
    case = make_case(
        "adaptive_softmax", shape, scale=0.05, temperature_coefficients=TEMPERATURE_PRESETS["icml2025-long"]
    )
    expected = run_reference(case)
    assert expected.stats[..., 0].max() > 8 and np.abs(expected.stats[..., 2] - 2.421).max() < 0.05
    result = run(case, kernel)
    np.testing.assert_allclose(result.output, expected.output, atol=1e-5)
    np.testing.assert_allclose(result.stats[..., 2], expected.stats[..., 2], rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("normalizer", ["softmax", "ssa", "adaptive_softmax", "entmax"])
def test_a_logit_that_is_no_number_spoils_its_row_only(normalizer: str, bad: float) -> None:
    case = make_case(normalizer, Shape(sequences=((40, 3),), kv_heads=1, group=1))
    query = case.inputs["query"].copy()
    query[1] = bad
    result = run(case.with_inputs(query=query), kernel=True)
    expected = run_reference(case)
    np.testing.assert_allclose(result.output[[0, 2]], expected.output[[0, 2]], atol=1e-5)
    assert np.isnan(result.output[1]).all()
