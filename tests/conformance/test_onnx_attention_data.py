"""ONNX's own test data for its standard Attention, wherever its semantics and ours with `normalizer` softmax coincide.

Left out: attn_mask and qk_matmul_output (we have neither), windows that look ahead, and lengths for which the standard
puts queries before the first key (nonpad_kv_seqlen below the number of queries). What the standard calls an external
cache, K and V of which nonpad_kv_seqlen places are filled, is our shared buffer after this call's keys were written.
"""

import warnings
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase

from tests.conformance.attention_cases import Case, make_model
from tests.conformance.cases import session

RENAMED = {"Q": "query", "K": "key", "V": "value", "past_key": "past_key", "past_value": "past_value"}


def _coincides(test: TestCase) -> bool:
    node = test.model.graph.node[0]
    if len(test.model.graph.node) > 1:  # the same test again, with the op written out
        return False
    attributes = {attribute.name: attribute for attribute in node.attribute}
    (feeds, _), *_ = test.data_sets
    arrays = dict(zip([name for name in node.input if name], feeds, strict=True))
    causal = "is_causal" in attributes and attributes["is_causal"].i
    left = attributes["left_window_size"].i if "left_window_size" in attributes else -1
    right = attributes["right_window_size"].i if "right_window_size" in attributes else -1
    nonpad = arrays.get("nonpad_kv_seqlen")
    return (
        not {"attn_mask", "qk_matmul_output"} & {*node.input, *node.output}
        and arrays["Q"].dtype in (np.float32, np.float16)
        and right == -1
        and (left == -1 or bool(causal))
        and (nonpad is None or not causal or bool((nonpad >= arrays["Q"].shape[-2]).all()))
    )


@pytest.fixture(scope="module")
def tests() -> list[TestCase]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other ops' data overflows on purpose
        return [test for test in collect_testcases("Attention") if _coincides(test)]


def _heads_first(array: np.ndarray, heads: int) -> np.ndarray:
    """The standard's three-dimensional form [batch, sequence, heads * dim] as [batch, heads, sequence, dim]."""
    batch, sequence, _ = array.shape
    return array.reshape(batch, sequence, heads, -1).transpose(0, 2, 1, 3)


def _as_ours(test: TestCase) -> tuple[Case, dict[str, np.ndarray]]:
    node = test.model.graph.node[0]
    attributes: dict[str, Any] = {attribute.name: attribute.i or attribute.f for attribute in node.attribute}
    (feeds, wanted), *_ = test.data_sets
    inputs = dict(zip([name for name in node.input if name], map(_array, feeds), strict=True))
    outputs = dict(zip([name for name in node.output if name], map(_array, wanted), strict=True))
    if inputs["Q"].ndim == 3:
        heads = {"Q": attributes["q_num_heads"], "K": attributes["kv_num_heads"], "V": attributes["kv_num_heads"]}
        inputs |= {name: _heads_first(inputs[name], number) for name, number in heads.items()}
        outputs["Y"] = _heads_first(outputs["Y"], attributes["q_num_heads"])
    ours = {RENAMED[name]: array for name, array in inputs.items() if name in RENAMED}
    causal = int(attributes.get("is_causal", 0))
    if "nonpad_kv_seqlen" in inputs:
        total = inputs["nonpad_kv_seqlen"].astype(np.int32)
        queries = ours["query"].shape[2]
        if causal:
            ours |= {f"past_{part}": ours[part] for part in ("key", "value")}
            for part in ("key", "value"):
                newest = [ours[part][row, :, end - queries : end] for row, end in enumerate(total)]
                ours[part] = np.stack(newest)
            ours["past_lens"] = total - queries
        else:
            ours["total_lens"] = total
    case = Case(
        "softmax",
        {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in ours.items()},
        {
            "scale": attributes.get("scale") or ours["query"].shape[3] ** -0.5,
            "softcap": attributes.get("softcap", 0.0),
            "window": attributes.get("left_window_size", -1) + 1 or -1,
            "causal": causal,
        },
    )
    return case, {{"Y": "output"}.get(name, name): array for name, array in outputs.items()}


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else numpy_helper.to_array(value)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "body"])
def test_standard_data(tests: list[TestCase], kernel: bool) -> None:
    assert len(tests) >= 25, [test.name for test in tests]
    for test in tests:
        case, expected = _as_ours(test)
        results = session(make_model(case, tuple(expected)), kernel).run(list(expected), case.inputs)
        half = next(iter(expected.values())).dtype == np.float16
        for (name, wanted), result in zip(expected.items(), results, strict=True):
            tolerance = 2e-3 if half else 1e-6
            np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=tolerance, err_msg=f"{test.name}: {name}")
