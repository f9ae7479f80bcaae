"""Sigmoid with a bias, and relu divided by a power of the number of visible keys.

`cases` has random calls with them.
"""

from types import ModuleType

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from sharp.plugins.op.normalizers import Normalizer, normalize
from sharp.plugins.op.torch_paged_attention import paged_attention
from tests.plugins.conformance import attention_cases, cases
from tests.plugins.conformance.cases import Case, Shape, assert_agrees, int8_case, make_case, run_reference, session
from tests.plugins.conformance.test_kernel_types import int8_model

# The columns of head_params that give the papers' formulas: a bias of -ln n, and division by n.
PAPERS = {"sigmoid": (0.0, 1.0), "relu": (1.0,), "relu2": (1.0,)}
FORMULAS = {
    "sigmoid": lambda z: 1 / (1 + np.exp(-(z - np.log(len(z))))),  # Ramapuram et al. 2024
    "relu": lambda z: np.maximum(z, 0) / len(z),  # Wortsman et al. 2023
    "relu2": lambda z: np.maximum(z, 0) ** 2 / len(z),
}


def of_papers(module: ModuleType, normalizer: str, *shape: object, **options: object) -> Case:
    case: Case = module.make_case(normalizer, *shape, sinks=True, **options)
    head_params = np.tile(np.array(PAPERS[normalizer], np.float32), (len(case.inputs["head_params"]), 1))
    return case.with_inputs(head_params=head_params)


@pytest.mark.parametrize("normalizer", PAPERS)
def test_the_reference_is_the_formula(normalizer: str) -> None:
    for count in (1, 2, 40, 1000):
        logits = np.random.default_rng(count).normal(0, 3, count)
        weights, statistics = normalize(logits, Normalizer(normalizer), PAPERS[normalizer])
        np.testing.assert_allclose(weights, FORMULAS[normalizer](logits), rtol=1e-12)
        plain, without = normalize(logits, Normalizer(normalizer))
        assert statistics.support == without.support
        if normalizer != "sigmoid":  # relu's division by a power of n scales all weights of a row
            np.testing.assert_allclose(weights * count, plain, rtol=1e-12)
            assert statistics.entropy == pytest.approx(without.entropy)


@pytest.mark.parametrize("normalizer", PAPERS)
@pytest.mark.parametrize("attributes", [{}, {"window": 9}, {"causal": False}, {"softcap": 2.0}])
def test_every_implementation_agrees(normalizer: str, attributes: dict[str, object]) -> None:
    shape = Shape(sequences=((600, 1), (0, 7), (90, 3)), holes=True)
    case = of_papers(cases, normalizer, shape, alibi=True, **attributes)
    expected = run_reference(case)
    for kernel in (True, False):
        assert_agrees(cases.run(case, kernel=kernel), expected, case)
    tensors = {name: torch.tensor(array) for name, array in case.inputs.items()}
    output = paged_attention(**tensors, normalizer=normalizer, **case.attributes)[0]
    np.testing.assert_allclose(output.numpy(), expected.output, atol=2e-5)
    contiguous = of_papers(attention_cases, normalizer, **attributes)
    for kernel in (True, False):
        attention_cases.assert_agrees(
            attention_cases.run(contiguous, kernel=kernel), attention_cases.run_reference(contiguous), contiguous
        )


@pytest.mark.parametrize("normalizer", PAPERS)
def test_a_long_context_that_is_split(normalizer: str) -> None:
    shape = Shape(sequences=((5000, 1), (2500, 2)), kv_heads=1, group=4, head_dim=16, value_dim=16, holes=True)
    case = of_papers(cases, normalizer, shape)
    result = cases.run(case, kernel=True)
    assert_agrees(result, run_reference(case), case, tolerance=2e-5)
    np.testing.assert_array_equal(result.output, cases.run(case, kernel=True, threads=1).output)


@pytest.mark.parametrize("normalizer", PAPERS)
def test_parameters_of_zero_change_nothing(normalizer: str) -> None:
    case = make_case(normalizer, Shape(sequences=((600, 1), (0, 7))), alibi=True)
    none = case.with_inputs(head_params=np.zeros((6, len(PAPERS[normalizer])), np.float32))
    for kernel in (True, False):
        expected, actual = cases.run(case, kernel=kernel), cases.run(none, kernel=kernel)
        np.testing.assert_array_equal(actual.output, expected.output)
        np.testing.assert_array_equal(actual.stats, expected.stats)


@pytest.mark.parametrize("normalizer", PAPERS)
def test_rows_without_a_key_are_zeros(normalizer: str) -> None:
    case = of_papers(cases, normalizer, Shape(sequences=((40, 3),)), window=0)
    for kernel in (True, False):
        result = cases.run(case, kernel=kernel)
        assert not result.output.any() and not result.stats.any()


@pytest.mark.parametrize("normalizer", PAPERS)
def test_int8_caches(normalizer: str) -> None:
    case = int8_case(of_papers(cases, normalizer, Shape(sequences=((300, 1), (0, 9))), alibi=True))
    output, stats = session(int8_model(case), kernel=True).run(["output", "stats"], case.inputs)
    expected = run_reference(case)
    np.testing.assert_allclose(output, expected.output, atol=2e-5)
    np.testing.assert_allclose(stats[..., 0], expected.stats[..., 0], atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_kernel_refuses_what_is_no_number(value: float) -> None:
    case = make_case("relu").with_inputs(head_params=np.full((6, 1), value, np.float32))
    with pytest.raises(InvalidArgument, match=r"head_params\[0\] has a number that is not finite"):
        cases.run(case, kernel=True)
