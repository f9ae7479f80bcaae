"""Entmax with an alpha just above 1, whose weights are powers of a high order, is as precise as the documents say."""

import numpy as np
import pytest

from tests.plugins.conformance import cases
from tests.plugins.conformance.cases import Shape, make_case, run_reference


@pytest.mark.parametrize("alpha", [1.0001, 1.001, 1.01, 1.1])
@pytest.mark.parametrize("scale", [0.3, 8.0])
@pytest.mark.parametrize("kernel", [True, False])
def test_the_error_grows_as_alpha_nears_one(alpha: float, scale: float, kernel: bool) -> None:
    """A weight is x^(1 / (alpha - 1)), so a rounding error of x (6e-8) is multiplied by 1 / (alpha - 1)."""
    case = make_case("entmax", Shape(sequences=((3000, 1), (0, 40), (600, 3))), alpha=alpha, scale=scale)
    result, expected = cases.run(case, kernel=kernel), run_reference(case)
    tolerance = max(1e-5, 3e-8 / (alpha - 1))
    assert np.abs(result.output - expected.output).max() <= tolerance * np.abs(expected.output).max()
    np.testing.assert_allclose(result.stats[..., 0], expected.stats[..., 0], rtol=0, atol=tolerance)
