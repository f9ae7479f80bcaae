"""ONNX's own test data for its standard Attention, wherever its semantics and ours with `normalizer` softmax coincide.

`_why_not` gives the reason for every test that is left out. The standard's external cache, K and V with
nonpad_kv_seqlen filled slots, is our shared buffer after this call's keys were written.
"""

from collections import Counter
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.test_case import TestCase

from tests.plugins.conformance.attention_cases import Case, make_model
from tests.plugins.conformance.cases import session

RENAMED = {"Q": "query", "K": "key", "V": "value", "past_key": "past_key", "past_value": "past_value"}


def _why_not(test: TestCase) -> str | None:
    """Return the reason why a test of the standard does not apply to our op, or None if it applies."""
    node = test.model.graph.node[0]
    if len(test.model.graph.node) > 1:
        return "the same test again, with the op written out"
    attributes = {attribute.name: attribute for attribute in node.attribute}
    (feeds, _), *_ = test.data_sets
    arrays = dict(zip([name for name in node.input if name], feeds, strict=True))
    causal = "is_causal" in attributes and bool(attributes["is_causal"].i)
    left = attributes["left_window_size"].i if "left_window_size" in attributes else -1
    right = attributes["right_window_size"].i if "right_window_size" in attributes else -1
    nonpad = arrays.get("nonpad_kv_seqlen")
    if "attn_mask" in node.input:
        return "attn_mask: who sees whom follows from positions and lengths"
    if "qk_matmul_output" in node.output:
        return "qk_matmul_output: logits are never all in memory"
    if arrays["Q"].dtype not in (np.float32, np.float16):
        return "bfloat16: ONNX Runtime takes no numpy array of it"
    if right != -1 or (left != -1 and not causal):
        return "a window that looks ahead"
    if nonpad is not None and causal and not bool((nonpad >= arrays["Q"].shape[-2]).all()):
        return "queries before the first key"
    return None


@pytest.fixture(scope="module")
def all_tests() -> list[TestCase]:
    def import_attention(_: object) -> None:  # the original imports, and so computes, the data of every op
        import_module(f"{node_cases.__name__}.attention")

    with mock.patch.object(node_cases, "import_recursive", import_attention):
        return list(node_cases.collect_testcases("Attention"))


@pytest.fixture(scope="module")
def tests(all_tests: list[TestCase]) -> list[TestCase]:
    return [test for test in all_tests if _why_not(test) is None]


def test_all_that_coincides_is_among_the_tests_that_run(all_tests: list[TestCase], tests: list[TestCase]) -> None:
    reasons = Counter(_why_not(test) or "run" for test in all_tests)
    print(*(f"{count:3} {reason}" for reason, count in reasons.most_common()), sep="\n")
    nodes = [test.model.graph.node[0] for test in tests]
    attributes = [
        {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute} for node in nodes
    ]
    queries = [(next(iter(test.data_sets))[0])[0] for test in tests]
    ran = {
        "causal": any(values.get("is_causal") for values in attributes),
        "both sides": any(not values.get("is_causal") for values in attributes),
        "scale": any("scale" in values for values in attributes),
        "soft cap": any(values.get("softcap") for values in attributes),
        "three dimensions": any(query.ndim == 3 for query in queries),
        "float16": any(query.dtype == np.float16 for query in queries),
        "a past": any("past_key" in node.input for node in nodes),
        "lengths": any("nonpad_kv_seqlen" in node.input for node in nodes),
        "grouped heads": any("gqa" in test.name for test in tests),
    }
    assert [name for name, one in ran.items() if not one] == []
    assert len(tests) >= 20


def _heads_first(array: np.ndarray, heads: int) -> np.ndarray:
    """Reshape the standard's [batch, sequence, heads * dim] to [batch, heads, sequence, dim]."""
    batch, sequence, _ = array.shape
    return array.reshape(batch, sequence, heads, -1).transpose(0, 2, 1, 3)


def _as_ours(test: TestCase) -> tuple[Case, dict[str, np.ndarray]]:
    node = test.model.graph.node[0]
    attributes: dict[str, Any] = {attribute.name: attribute.i or attribute.f for attribute in node.attribute}
    (feeds, target), *_ = test.data_sets
    inputs = dict(zip([name for name in node.input if name], map(_array, feeds), strict=True))
    outputs = dict(zip([name for name in node.output if name], map(_array, target), strict=True))
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
        for (name, target), result in zip(expected.items(), results, strict=True):
            tolerance = 2e-3 if half else 1e-6
            np.testing.assert_allclose(result, target, rtol=1e-3, atol=tolerance, err_msg=f"{test.name}: {name}")
