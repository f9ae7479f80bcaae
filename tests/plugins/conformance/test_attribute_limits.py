"""Every implementation refuses the same values of an attribute, with the same message."""

import math
import re
from typing import Any

import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

from sharp.core.errors import InputError
from sharp.plugins.op.function_body import attach_function
from sharp.plugins.op.torch_paged_attention import paged_attention
from tests.plugins.conformance.cases import Case, make_case, make_model, run_reference, session

REFUSED = [
    ("softmax", "scale", 0.0, "attribute scale is 0; it must be a positive, finite number"),
    ("softmax", "scale", -0.25, "attribute scale is -0.25; it must be a positive, finite number"),
    ("ssa", "scale", math.inf, "attribute scale is inf; it must be a positive, finite number"),
    ("softmax", "scale", math.nan, "attribute scale is nan; it must be a positive, finite number"),
    ("entmax", "alpha", 1.0, "attribute alpha is 1; it must be a finite number above 1 for entmax"),
    ("entmax", "alpha", math.inf, "attribute alpha is inf; it must be a finite number above 1 for entmax"),
    ("softmax", "softcap", -1.0, "attribute softcap is -1; it must be 0 (off) or a positive, finite number"),
    ("softmax", "window", -2, "attribute window is -2; it must be -1 (off), 0 or more"),
    ("softmax", "stats_columns", 6, "attribute stats_columns is 6; it must be 4, or 5 with the sink's mass"),
    (
        "adaptive_softmax",
        "temperature_coefficients",
        [0.5] * 9,
        "temperature_coefficients has 9 numbers; it must have 1",
    ),
]


@pytest.fixture(params=REFUSED, ids=lambda refused: f"{refused[1]}={refused[2]}")
def refused(request: pytest.FixtureRequest) -> tuple[Case, str]:
    normalizer, name, value, words = request.param
    case = make_case(normalizer)
    return Case(normalizer, case.inputs, {**case.attributes, name: value}), re.escape(words)


def test_the_reference(refused: tuple[Case, str]) -> None:
    case, words = refused
    with pytest.raises(InputError, match=words):
        run_reference(case)


def test_the_op_for_pytorch(refused: tuple[Case, str]) -> None:
    case, words = refused
    tensors: dict[str, Any] = {name: torch.from_numpy(array.copy()) for name, array in case.inputs.items()}
    with pytest.raises(InputError, match=words):
        paged_attention(**tensors, normalizer=case.normalizer, **case.attributes)


def test_the_function_body(refused: tuple[Case, str]) -> None:
    case, words = refused
    with pytest.raises(InputError, match=words):
        attach_function(make_model(case, body=False))


def test_the_kernel_on_the_cpu(refused: tuple[Case, str]) -> None:
    case, words = refused
    with pytest.raises(RuntimeException, match=words):
        session(make_model(case, body=False), kernel=True)
