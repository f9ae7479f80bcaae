"""Entmax with a large alpha, whose weights are roots of a high order, on logits that float32 holds exactly."""

import numpy as np
import pytest

from tests.plugins.conformance import cases
from tests.plugins.conformance.cases import Shape, make_case, run_reference


@pytest.mark.parametrize("alpha", [2.5, 4.0, 8.0, 64.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kernel", [True, False])
def test_ties_and_gaps(alpha: float, sinks: bool, kernel: bool) -> None:
    # Queries, keys and the scale make every logit a multiple of 2^-8, so there are gaps and ties without any rounding.
    shape = Shape(sequences=((600, 1), (0, 40), (90, 3)), integers=True, holes=True)
    case = make_case("entmax", shape, alpha=alpha, sinks=sinks, scale=2.0**-8)
    result, expected = cases.run(case, kernel=kernel), run_reference(case)
    np.testing.assert_allclose(result.output, expected.output, atol=5e-6)
    np.testing.assert_allclose(result.stats[..., 0], expected.stats[..., 0], atol=1e-4)


@pytest.mark.parametrize("alpha", [4.0, 8.0, 64.0])
@pytest.mark.parametrize("scale", [1e-3, 0.3, 30.0])
def test_random_logits(alpha: float, scale: float) -> None:
    """Results agree in most rows. In a few rows, a rounding error of two close logits moves weight between them."""
    case = make_case("entmax", Shape(sequences=((600, 1), (0, 40), (90, 3))), alpha=alpha, scale=scale)
    expected = run_reference(case).output
    for kernel in (True, False):
        error = np.abs(cases.run(case, kernel=kernel).output - expected).max(-1)
        assert np.median(error) < 2e-5
        assert (error > 1e-3).mean() < 0.02


def test_a_row_with_a_nan_stays_one() -> None:
    case = make_case("entmax", Shape(sequences=((60, 2),)), alpha=8.0)
    query = case.inputs["query"].copy()
    query[0] = np.nan
    result = cases.run(case.with_inputs(query=query), kernel=True).output
    assert np.isnan(result[0]).all() and np.isfinite(result[1]).all()
