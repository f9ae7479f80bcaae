"""The kernel's entmax weights equal those of the `entmax` package, the authors' own implementation."""

import numpy as np
import pytest
import torch
from entmax import entmax15, entmax_bisect, sparsemax

from tests.plugins.conformance.cases import Shape, make_case, run

KEYS = 100


@pytest.mark.parametrize(("spread", "kernel"), [(0.3, True), (3.0, True), (30.0, True), (3.0, False)])
@pytest.mark.parametrize("alpha", [1.1, 1.3, 1.5, 1.75, 2.0])
def test_weights_equal_the_package(alpha: float, spread: float, kernel: bool) -> None:
    # With one head of one channel, the logit of a key is the key itself. Values that are unit vectors make the output
    # the weights.
    shape = Shape(sequences=((0, KEYS),), kv_heads=1, group=1, head_dim=1, value_dim=KEYS)
    case = make_case("entmax", shape, alpha=alpha, scale=1.0)
    logits = np.random.default_rng(0).normal(0, spread, KEYS).astype(np.float32)
    case = case.with_inputs(
        query=np.ones((KEYS, 1, 1), np.float32),
        key=logits[:, None, None],
        value=np.eye(KEYS, dtype=np.float32)[:, None, :],
    )
    weights = run(case, kernel=kernel).output[-1, 0]  # the last query sees every key
    row = torch.from_numpy(logits.astype(np.float64))
    if alpha == 1.5:
        expected = entmax15(row)
    elif alpha == 2.0:
        expected = sparsemax(row)
    else:
        expected = entmax_bisect(row, alpha=alpha, n_iter=60)
    np.testing.assert_allclose(weights, expected.numpy(), rtol=0, atol=1e-5 * float(expected.max()))
