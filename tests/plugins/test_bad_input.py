"""Every wrong input or attribute gives one clear sentence, and never a crash."""

from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, RuntimeException

from sharp.plugins.op.schema import OUTPUTS
from tests.plugins.conformance.cases import Case, make_case, make_model, session
from tests.plugins.conformance.test_kernel_types import int8_case, int8_model

GOOD = make_case("ssa", alibi=True)  # 9 tokens, 6 query heads, 2 key-value heads


def _changed(name: str, index: int, value: float) -> np.ndarray:
    array = GOOD.inputs[name].copy()
    array.flat[index] = value
    return array


BAD_INPUTS = [
    ({"slot_mapping": _changed("slot_mapping", 2, 9999)}, r"slot_mapping\[2\] is 9999; it must be from -1 to \d+"),
    ({"slot_mapping": _changed("slot_mapping", 0, -2)}, r"slot_mapping\[0\] is -2; it must be from -1"),
    ({"slot_mapping": GOOD.inputs["slot_mapping"][1:]}, r"slot_mapping has shape \[8\]; it must be \[tokens\] = \[9\]"),
    (
        {"block_table": _changed("block_table", 0, 77)},
        r"block_table\[0\] is 77; it must be from -1 to \d+ \(the cache has",
    ),
    ({"block_table": _changed("block_table", 0, -5)}, r"block_table\[0\] is -5; it must be from -1"),
    (
        {"block_table": GOOD.inputs["block_table"][:, :1]},
        r"context_lens\[1\] is 20; it must be from 0 to 15 \(max_blocks",
    ),
    ({"context_lens": _changed("context_lens", 0, -1)}, r"context_lens\[0\] is -1; it must be from 0"),
    ({"context_lens": _changed("context_lens", 0, 2**31 - 1)}, r"context_lens\[0\] is 2147483647"),
    ({"query_start": _changed("query_start", 0, 1)}, r"query_start\[0\] is 1; it must be 0"),
    ({"query_start": _changed("query_start", 2, 99)}, r"query_start\[3\] is 6; it must be at least its predecessor 99"),
    ({"query_start": _changed("query_start", 4, 10)}, r"query_start\[4\] is 10; it must be the number of tokens, 9"),
    (
        {"query_start": GOOD.inputs["query_start"][:-1]},
        r"query_start has shape \[4\]; it must be \[sequences \+ 1\] = \[5\]",
    ),
    ({"head_params": _changed("head_params", 2, 0.0)}, r"head_params\[1\] has b = 0; ssa needs b > 0 and n > 0"),
    ({"head_params": np.zeros((0, 2), np.float32)}, r"ssa needs head_params \[q_heads, 2\]: b and n of every head"),
]


@pytest.fixture(scope="module")
def kernel() -> Any:
    model = make_model(GOOD)
    # Without declared shapes, the kernel must check the shapes, not ONNX Runtime.
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    return session(model, kernel=True)


@pytest.mark.parametrize(("changed", "message"), BAD_INPUTS)
def test_bad_input(changed: dict[str, np.ndarray], message: str, kernel: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"PagedAttention: {message}"):
        kernel.run(None, {**GOOD.inputs, **changed})


@pytest.mark.parametrize("max_blocks", [3, 129])
def test_a_sequence_whose_length_is_no_int32_is_refused(kernel: Any, max_blocks: int) -> None:
    """Lengths of caches without blocks, which may have any block size, do not overflow.

    Once such a length became negative; 129 * 2^56 does not fit in an int64.
    """
    sequences = len(GOOD.inputs["context_lens"])
    huge = {
        "key_cache": np.empty((0, 2, 8, 2**56), np.float32),
        "value_cache": np.empty((0, 2, 2**56, 12), np.float32),
        "block_table": np.full((sequences, max_blocks), -1, np.int32),
        "slot_mapping": np.full(9, -1, np.int32),
        "context_lens": np.full(sequences, 2**31 - 1, np.int32),
    }
    with pytest.raises(InvalidArgument, match=r"context_lens\[0\] is 2147483647; it must be from 0 to 21474836\d\d \("):
        kernel.run(None, {**GOOD.inputs, **huge})


SHAPES = [
    ("query", (9, 6), r"query has shape \[9, 6\]; it must have the dimensions \[tokens, q_heads, head_dim\]"),
    ("query", (9, 5, 8), r"key has shape \[9, 2, 8\]; kv_heads must divide q_heads, 5"),
    ("key", (9, 2, 7), r"key has shape \[9, 2, 7\]; it must be \[tokens, kv_heads, head_dim\] = \[9, 2, 8\]"),
    ("key", (9, 0, 8), r"key has shape \[9, 0, 8\]; kv_heads must be at least 1"),
    ("value", (8, 2, 12), r"value has shape \[8, 2, 12\]; it must be \[tokens, kv_heads, value_dim\] = \[9, 2, 12\]"),
    ("value", (9, 2, 0), r"value has shape \[9, 2, 0\]; value_dim must be at least 1"),
    ("key_cache", (4, 2, 7, 16), r"key_cache has shape .*; it must be \[blocks, kv_heads, head_dim, block_size\]"),
    ("key_cache", (4, 2, 8, 0), r"key_cache has shape .*; block_size must be at least 1"),
    (
        "value_cache",
        (4, 2, 16, 12),
        r"value_cache has shape .*; it must be \[blocks, kv_heads, block_size, value_dim\]",
    ),
    ("alibi_slopes", (5,), r"alibi_slopes has shape \[5\]; it must be \[q_heads\] = \[6\]"),
    ("head_params", (6, 1), r"head_params has 1 columns; ssa takes 2 \(b, n\) or 3 \(the sink behind them\)"),
]


@pytest.mark.parametrize(("name", "shape", "message"), SHAPES)
def test_bad_shape(name: str, shape: tuple[int, ...], message: str, kernel: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"PagedAttention: {message}"):
        kernel.run(None, {**GOOD.inputs, name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("normalizer", "attributes", "message"),
    [
        ("entmax", {"alpha": 1.0}, "alpha is 1; it must be a finite number above 1 for entmax"),
        ("softmax", {"softcap": -1.0}, r"softcap is -1; it must be 0 \(off\)"),
        ("softmax", {"window": -2}, "window is -2; it must be -1"),
        ("softmax", {"scale": float("inf")}, "scale is inf; it must be a positive, finite number"),
        ("softmax", {"scale": 0.0}, "scale is 0; it must be a positive, finite number"),
        ("softmax", {"scale": -0.25}, "scale is -0.25; it must be a positive, finite number"),
    ],
)
def test_bad_attribute(normalizer: str, attributes: dict[str, Any], message: str) -> None:
    case = make_case(normalizer)
    with pytest.raises(RuntimeException, match=f"PagedAttention: attribute {message}"):
        session(make_model(Case(normalizer, case.inputs, {**case.attributes, **attributes}), body=False), kernel=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("alpha", 2, "alpha is of another type; it must be a float"),
        ("scale", 1, "scale is of another type; it must be a float"),
        ("window", 64.0, "window is of another type; it must be an int"),
        ("causal", "no", "causal is of another type; it must be an int"),
        ("normalizer", 1, "normalizer is of another type; it must be a string"),
        ("temperature_coefficients", [1, 2], "temperature_coefficients is empty or of another type; it must be a list"),
        ("temperature_coefficients", 1.0, "temperature_coefficients is empty or of another type; it must be a list"),
    ],
)
def test_an_attribute_of_another_type_does_not_pass_for_one_that_is_left_out(
    name: str, value: Any, message: str
) -> None:
    model = make_model(make_case("entmax"))
    del model.functions[:]
    attributes = model.graph.node[0].attribute
    kept = [attribute for attribute in attributes if attribute.name != name]
    del attributes[:]
    attributes.extend([*kept, helper.make_attribute(name, value)])
    with pytest.raises(RuntimeException, match=f"PagedAttention: attribute {message}"):
        session(model, kernel=True)


@pytest.mark.parametrize("shortened", [True, False])
def test_a_scale_without_an_output_for_it(shortened: bool) -> None:
    case = int8_case(make_case("softmax"))
    model = int8_model(case)
    if shortened:
        del model.graph.node[0].output[len(OUTPUTS) :]
    else:
        model.graph.node[0].output[len(OUTPUTS)] = ""
    produced = [value for value in model.graph.output if value.name in model.graph.node[0].output]
    del model.graph.output[:]
    model.graph.output.extend(produced)
    with pytest.raises(InvalidArgument, match="key_scale is given, but the node has no output key_scale_out"):
        session(model, kernel=True).run(None, case.inputs)


def test_an_unknown_normalizer_is_refused_by_the_kernel() -> None:
    model = make_model(make_case("softmax"))
    names = [attribute.name for attribute in model.graph.node[0].attribute]
    model.graph.node[0].attribute[names.index("normalizer")].s = b"hardmax"
    with pytest.raises(RuntimeException, match="'hardmax'; it must be one of softmax, ssa"):
        session(model, kernel=True)


def test_the_name_of_a_normalizer_that_has_several_lines_is_refused_in_one() -> None:
    model = make_model(make_case("softmax"))
    names = [attribute.name for attribute in model.graph.node[0].attribute]
    model.graph.node[0].attribute[names.index("normalizer")].s = b"soft\nmax" + b"x" * 1000
    with pytest.raises(RuntimeException, match=r"'soft\?maxx+\.\.\.'; it must be one of softmax, ssa") as refused:
        session(model, kernel=True)
    assert "\n" not in str(refused.value).strip()
