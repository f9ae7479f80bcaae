"""The float64 reference agrees with sources outside the project."""

import json
from pathlib import Path
from typing import Any

import entmax as entmax_package
import numpy as np
import pytest
import torch

from sharp.core.errors import InputError
from sharp.plugins.op.normalizers import Normalizer, entmax, normalize
from sharp.plugins.op.torch_entmax import entmax as torch_entmax
from tests.plugins.conformance.cases import Shape, make_case, run_reference

GOLDEN = json.loads((Path(__file__).parent / "normalizers.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['normalizer']}-{len(row['logits'])}")
def test_golden_rows(row: dict[str, Any]) -> None:
    normalizer = Normalizer(row["normalizer"], alpha=row.get("alpha", 1.5))
    own = (row["b"], row["n"]) if row["normalizer"] == "ssa" else ()
    weights, statistics = normalize(np.array(row["logits"]), normalizer, own)
    np.testing.assert_allclose(weights, row["weights"], rtol=0, atol=1e-12)
    assert statistics.entropy == pytest.approx(row["entropy"], abs=1e-12)
    assert statistics.support == row["support"]
    assert statistics.inverse_temperature == pytest.approx(row["inverse_temperature"], abs=1e-12)
    assert statistics.logit_spread == pytest.approx(row["logit_spread"], abs=1e-12)


def test_entropy_of_weights_that_vanish_beside_their_sum() -> None:
    # Sigmoid far below zero: e^-745 / 3 is 0, and 0 ln 0 must not be NaN.
    _, statistics = normalize(np.array([50.0, 50.0, 50.0, -745.0]), Normalizer("sigmoid"))
    assert statistics.entropy == pytest.approx(np.log(3))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("count", [1, 2, 17, 500])
def test_entmax_is_that_of_the_entmax_package(alpha: float, count: int) -> None:
    logits = np.random.default_rng(count).standard_normal(count) * 3
    exact = {1.5: entmax_package.entmax15, 2.0: entmax_package.sparsemax}[alpha]
    np.testing.assert_allclose(entmax(logits, alpha), exact(torch.tensor(logits), dim=0).numpy(), atol=1e-12)


def exact_entmax(logits: np.ndarray, alpha: float) -> np.ndarray:
    """Return entmax weights by sorting the logits.

    The threshold tau is the lowest logit with a weight, minus delta. The logarithm of delta is found by bisection.
    """
    power, s = 1 / (alpha - 1), (alpha - 1) * (logits - logits.max())
    level = min(level for level in np.unique(s) if (np.maximum(s - level, 0) ** power).sum() < 1)
    low, high = -1e4, 0.0
    for _ in range(200):
        middle = (low + high) / 2
        total = ((s[s > level] - level + np.exp(middle)) ** power).sum() + (s == level).sum() * np.exp(power * middle)
        low, high = (middle, high) if total < 1 else (low, middle)
    excess = np.maximum(s - level, 0) + np.exp(low)
    return np.asarray(np.where(s > level, excess**power, np.where(s == level, np.exp(power * low), 0)))


LARGE_ALPHA = [2.5, 3.0, 4.0, 8.0, 16.0, 64.0]


@pytest.mark.parametrize("alpha", LARGE_ALPHA)
@pytest.mark.parametrize("spread", [0.3, 3.0, 100.0])
def test_entmax_of_a_large_alpha(alpha: float, spread: float) -> None:
    for count in (1, 2, 5, 40, 1000):
        # rounding makes ties among the logits
        logits = np.random.default_rng(count).normal(0, spread, (20, count)).round(3)
        expected = np.stack([exact_entmax(row, alpha) for row in logits])
        assert expected.sum(-1) == pytest.approx(1)
        np.testing.assert_allclose([entmax(row, alpha) for row in logits], expected, atol=1e-9)
        narrow = torch_entmax(torch.tensor(logits.astype(np.float32)), alpha).numpy()
        narrow_expected = np.stack([exact_entmax(row.astype(np.float32).astype(np.float64), alpha) for row in logits])
        np.testing.assert_allclose(narrow, narrow_expected, atol=5e-6)


@pytest.mark.parametrize("alpha", [1.05, 1.2, 1.5, 3.0, 6.0])
def test_entmax_weights_solve_the_definition(alpha: float) -> None:
    logits = np.random.default_rng(5).standard_normal(40)
    weights = entmax(logits, alpha)
    kept = weights > 0
    # (alpha - 1) z - p^(alpha - 1) equals the same tau for every kept key, and no dropped key lies above tau.
    tau = (alpha - 1) * logits[kept] - weights[kept] ** (alpha - 1)
    np.testing.assert_allclose(tau, tau[0], atol=1e-12)
    assert ((alpha - 1) * logits[~kept] <= tau[0] + 1e-12).all()
    assert weights.sum() == pytest.approx(1, abs=1e-14)


def test_softmax_is_torch_attention() -> None:
    case = make_case("softmax", Shape(sequences=((0, 9),), kv_heads=2, group=3))
    query, key, value = (torch.tensor(case.inputs[name]).double().transpose(0, 1) for name in ("query", "key", "value"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=case.attributes["scale"], enable_gqa=True
    )
    np.testing.assert_allclose(run_reference(case).output, expected.transpose(0, 1).numpy(), atol=1e-12)


def test_window_and_dropped_slot_in_numbers() -> None:
    # With one head, one channel and equal logits, the output is the mean of the visible values.
    case = make_case("softmax", Shape(((3, 2),), 1, 1, 1, 1), window=2, scale=1e-30)
    table, slots = case.inputs["block_table"], case.inputs["slot_mapping"].copy()
    values = case.inputs["value_cache"][table[0, 0], 0, :5, 0].astype(np.float64)
    slots[0] = -1  # position 3 keeps the content of its slot
    result = run_reference(case.with_inputs(slot_mapping=slots))
    new = case.inputs["value"][:, 0, 0].astype(np.float64)
    np.testing.assert_allclose(result.output[:, 0, 0], [(values[2] + values[3]) / 2, (values[3] + new[1]) / 2])
    np.testing.assert_array_equal(result.stats[:, 0, 1], [2, 2])


@pytest.mark.parametrize(("name", "alpha"), [("hardmax", 1.5), ("entmax", 1.0)])
def test_bad_normalizers_are_refused(name: str, alpha: float) -> None:
    with pytest.raises(InputError, match=r"it must be one of|alpha is 1; it must be a finite number above 1"):
        Normalizer(name, alpha=alpha)
