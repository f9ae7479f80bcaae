"""All statistics of a row with a NaN among its logits are NaN: reference, CPU op, function body and PyTorch."""

import numpy as np
import pytest
import torch

from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.op.schema import NORMALIZERS
from sharp.plugins.op.torch_paged_attention import paged_attention
from tests.plugins.conformance import cases
from tests.plugins.conformance.cases import Case, Shape, assert_statistics_agree, make_case, run_reference


def run_torch(case: Case) -> AttentionOutput:
    tensors = {name: torch.tensor(array) for name, array in case.inputs.items()}
    attributes = {**case.attributes, "causal": bool(case.attributes.get("causal", 1))}
    results = paged_attention(**tensors, normalizer=case.normalizer, **attributes)
    return AttentionOutput(*(result.numpy() for result in results))


IMPLEMENTATIONS = {
    "reference": run_reference,
    "kernel": lambda case: cases.run(case, kernel=True),
    "body": lambda case: cases.run(case, kernel=False),
    "torch": run_torch,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_no_statistic_of_an_undefined_row_is_a_number(normalizer: str, sinks: bool, implementation: str) -> None:
    case = make_case(normalizer, Shape(sequences=((6, 3), (0, 2))), sinks=sinks)  # or bias and power of sigmoid, relu
    query, key = case.inputs["query"].copy(), case.inputs["key"].copy()
    query[0, 0] = np.nan  # the first head of the first token
    key[2] = np.nan  # the third token of the first sequence, which only that token sees
    spoilt = IMPLEMENTATIONS[implementation](case.with_inputs(query=query, key=key))
    undefined = np.zeros(spoilt.stats.shape[:2], bool)
    undefined[0, 0] = undefined[2] = True
    assert np.isnan(spoilt.stats[undefined]).all()
    assert np.isnan(spoilt.output[undefined]).all()
    defined = ~undefined
    assert_statistics_agree(spoilt.stats[defined], run_reference(case).stats[defined], normalizer, False, 1e-5)
