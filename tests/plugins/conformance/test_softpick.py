"""Softpick (Zuhri et al. 2025) agrees with its formula, and differs from every other normalizer where it should."""

import numpy as np
import pytest
import torch

from sharp.plugins.op.normalizers import Normalizer, normalize
from sharp.plugins.op.torch_attention import attention
from tests.plugins.conformance import attention_cases
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, make_case, run, run_reference

SOFTPICK = Normalizer("softpick")
FEW = Shape(sequences=((40, 1), (0, 7)), kv_heads=1, group=2, head_dim=4, value_dim=4)


def formula(logits: np.ndarray) -> np.ndarray:
    """Return softpick weights by the equation as printed, which overflows for logits of 710 and more."""
    parts = np.expm1(logits)
    return np.asarray(np.maximum(parts, 0) / np.abs(parts).sum())


def with_logits(logits: np.ndarray) -> Case:
    """Return a case with one query that has `logits`, and whose output is its weights."""
    keys = len(logits)
    case = make_case("softpick", Shape(((keys - 1, 1),), 1, 1, 1, keys), scale=1.0)
    table, cache = case.inputs["block_table"], {name: case.inputs[name].copy() for name in ("key_cache", "value_cache")}
    values = np.eye(keys, dtype=np.float32)
    for position, logit in enumerate(logits):
        block, offset = table[0, position // 16], position % 16
        cache["key_cache"][block, 0, 0, offset], cache["value_cache"][block, 0, offset] = logit, values[position]
    ones = np.ones((1, 1, 1), np.float32)
    return case.with_inputs(**cache, query=ones, key=ones * np.float32(logits[-1]), value=values[None, -1:])


def all_weights(logits: np.ndarray) -> dict[str, np.ndarray]:
    """Return the weights of `logits` by every implementation."""
    case = with_logits(logits)
    weights = {name: run(case, kernel=name == "kernel").output.ravel() for name in ("kernel", "body")}
    rows = torch.tensor(logits, dtype=torch.float32).view(1, 1, 1, -1)
    ones = torch.ones(1, 1, 1, 1)
    values = torch.eye(len(logits))[None, None]
    by_torch = attention(ones, rows.transpose(2, 3), values, normalizer="softpick", scale=1.0, causal=False)[0]
    return {**weights, "torch": by_torch.numpy().ravel(), "float64": normalize(logits, SOFTPICK)[0]}


@pytest.mark.parametrize("spread", [1e-6, 0.3, 30.0])
def test_the_formula(spread: float) -> None:
    for count in (1, 40):
        logits = np.random.default_rng(count).normal(0, spread, count).astype(np.float32).astype(np.float64)
        for name, weights in all_weights(logits).items():
            np.testing.assert_allclose(weights, formula(logits), rtol=1e-5, atol=1e-7, err_msg=name)


def test_logits_beyond_the_range_of_exp() -> None:
    logits = np.array([900.0, 899.0, 0.0, -900.0, 3.0])
    expected = [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1)), 0, 0, 0]
    for name, weights in all_weights(logits).items():
        np.testing.assert_allclose(weights, expected, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("logits", [np.zeros(5), np.linspace(-9, 0, 20), np.full(3, -200.0)])
def test_a_row_without_a_positive_logit_has_no_weights(logits: np.ndarray) -> None:
    for name, weights in all_weights(logits).items():
        np.testing.assert_array_equal(weights, 0, err_msg=name)
    for kernel in (True, False):
        entropy, support, _, spread = run(with_logits(logits), kernel=kernel).stats.ravel()
        assert (entropy, support) == (0, 0) and spread == pytest.approx(np.ptp(logits))


def test_a_logit_of_minus_infinity_is_as_good_as_masked() -> None:
    logits = np.array([1.0, -np.inf, -0.5, 2.0])
    for weights in all_weights(logits).values():
        np.testing.assert_allclose(weights[[0, 2, 3]], formula(logits[[0, 2, 3]]), atol=1e-6)
        assert weights[1] == 0


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_logit_that_is_no_number_spoils_the_row(number: float) -> None:
    for name, weights in all_weights(np.array([1.0, number, -0.5, 2.0])).items():
        assert np.isnan(weights).all(), name


def test_entropy_is_of_the_shares() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 40)
    shares = formula(logits)[logits > 0] / formula(logits).sum()
    _, statistics = normalize(logits, SOFTPICK)
    assert statistics.entropy == pytest.approx(-(shares * np.log(shares)).sum())
    assert statistics.support == (logits > 0).sum()


def test_parts_whose_largest_logits_are_far_apart() -> None:
    shape = Shape(sequences=((5000, 1), (2500, 2)), kv_heads=1, group=4, head_dim=16, value_dim=16, holes=True)
    for scale in (0.05, 3.0):
        case = make_case("softpick", shape, scale=scale, sinks=True)
        result = run(case, kernel=True)
        assert_agrees(result, run_reference(case), case, tolerance=2e-5)
        np.testing.assert_array_equal(result.output, run(case, kernel=True, threads=1).output)


@pytest.mark.parametrize("sink", [-np.inf, -3.0, 0.0, 1e-3, 2.0, 90.0, 1000.0])
def test_a_sink_is_a_key_without_value(sink: float) -> None:
    case = make_case("softpick", FEW, sinks=True)
    case = case.with_inputs(head_params=np.full((2, 1), sink, np.float32))
    expected, without = run_reference(case), run_reference(make_case("softpick", FEW))
    for kernel in (True, False):
        assert_agrees(run(case, kernel=kernel), expected, case)
    contiguous = attention_cases.make_case("softpick", sinks=True)
    contiguous = contiguous.with_inputs(head_params=np.full_like(contiguous.inputs["head_params"], sink))
    for kernel in (True, False):
        attention_cases.assert_agrees(
            attention_cases.run(contiguous, kernel=kernel), attention_cases.run_reference(contiguous), contiguous
        )
    np.testing.assert_array_equal(expected.stats[..., :4], without.stats)
    if sink in (-np.inf, 0.0):  # such a sink adds |e^0 - 1| = 0 to the sum, or is absent
        np.testing.assert_allclose(expected.output, without.output, rtol=1e-12, atol=1e-14)
