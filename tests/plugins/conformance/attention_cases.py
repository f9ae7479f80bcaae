"""Random calls of Attention, and the ways to run one: reference, ONNX Runtime with and without the kernel."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import helper

from sharp.plugins.op.attention_reference import ContiguousOutput, attention
from sharp.plugins.op.function_body import attach_function
from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.op.schema import ATTENTION, DEFAULT_STATS_COLUMNS, DOMAIN, NORMALIZERS, VERSION
from tests.plugins.conformance.cases import (
    Case,
    assert_statistics_agree,
    columns_with,
    random_head_params,
    random_numbers,
    session,
    slack_of_beta,
    vanished_rows_alike,
)

FORMS = ("none", "concatenating", "shared")
OUTPUTS = ATTENTION.output_names
SHAPES = {
    "query": ["batch", "q_heads", "queries", "head_dim"],
    "key": ["batch", "kv_heads", "new_keys", "head_dim"],
    "value": ["batch", "kv_heads", "new_keys", "value_dim"],
    "past_key": ["batch", "kv_heads", "past", "head_dim"],
    "past_value": ["batch", "kv_heads", "past", "value_dim"],
    "past_lens": ["batch"],
    "total_lens": ["batch"],
    "head_params": ["q_heads", "parameters"],
    "alibi_slopes": ["q_heads"],
    "collect_stats": [],
    "output": ["batch", "q_heads", "queries", "value_dim"],
    "present_key": ["batch", "kv_heads", "keys", "head_dim"],
    "present_value": ["batch", "kv_heads", "keys", "value_dim"],
    "stats": ["batch", "q_heads", "queries", "statistics"],
}
DYNAMIC = ("batch", "queries", "new_keys", "past", "keys")


@dataclass(frozen=True)
class Shape:
    """The sizes of a random case. `past` is the capacity of the buffer if the form is "shared"."""

    form: Literal["none", "concatenating", "shared"] = "none"
    batch: int = 2
    queries: int = 5
    new_keys: int = 5
    past: int = 0
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 8
    value_dim: int = 12
    integers: bool = False
    padded: bool = False


def make_case(
    normalizer: str,
    shape: Shape = Shape(),
    seed: int = 0,
    alibi: bool = False,
    sinks: bool = False,
    **attributes: Any,
) -> Case:
    """Return a random case, with NaN wherever no query may look (padding, unfilled slots of a buffer)."""
    rng = np.random.default_rng(seed)
    q_heads, kv = shape.kv_heads * shape.group, (shape.batch, shape.kv_heads)
    inputs = {
        "query": random_numbers(rng, shape.integers, (shape.batch, q_heads, shape.queries, shape.head_dim)),
        "key": random_numbers(rng, shape.integers, (*kv, shape.new_keys, shape.head_dim)),
        "value": rng.standard_normal((*kv, shape.new_keys, shape.value_dim)).astype(np.float32),
    }
    filled = np.full(shape.batch, shape.past if shape.form == "concatenating" else 0)
    if shape.form != "none":
        inputs["past_key"] = random_numbers(rng, shape.integers, (*kv, shape.past, shape.head_dim))
        inputs["past_value"] = rng.standard_normal((*kv, shape.past, shape.value_dim)).astype(np.float32)
    if shape.form == "shared":
        room = shape.past if shape.padded else shape.past - shape.new_keys
        filled = rng.integers(0, room + 1, shape.batch)
        inputs["past_lens"] = filled.astype(np.int32)
        for sequence, first in enumerate(filled):
            inputs["past_key"][sequence, :, first:] = inputs["past_value"][sequence, :, first:] = np.nan
    if shape.padded:
        most = filled + shape.new_keys
        total = rng.integers(0, most + 1)
        total[0] = most[0]  # one sequence fills its row, beside sequences that are padded
        if shape.form == "shared":
            total = np.minimum(np.maximum(total, filled), shape.past)
        inputs["total_lens"] = total.astype(np.int32)
        for sequence, (first, end) in enumerate(zip(filled, total, strict=True)):
            for name in ("key", "value"):
                inputs[name][sequence, :, max(end - first, 0) :] = np.nan
    head_params = random_head_params(rng, normalizer, q_heads, sinks)
    if head_params is not None:
        inputs["head_params"] = head_params
    if alibi:
        # Eighths keep logits exact where they are whole numbers.
        inputs["alibi_slopes"] = (rng.integers(0, 9, q_heads) / 8).astype(np.float32)
    inputs["collect_stats"] = np.array(True)
    attributes = {"scale": 1.5 / np.sqrt(shape.head_dim).item(), **columns_with(sinks), **attributes}
    made_by = f"make_case({normalizer!r}, {shape}, {seed}, {alibi}, {sinks}, **{attributes})"
    return Case(normalizer, inputs, attributes, made_by, ties=shape.integers)


@st.composite
def cases(draw: st.DrawFn, normalizers: tuple[str, ...] = NORMALIZERS) -> Case:
    """Generate calls of every form and with every option."""
    form = draw(st.sampled_from(FORMS))
    new_keys = draw(st.sampled_from((1, 1, 3, 17, 70)))
    shape = Shape(
        form=form,
        batch=draw(st.integers(1, 3)),
        queries=draw(st.sampled_from((new_keys, new_keys, 1, 4))),
        new_keys=new_keys,
        past=draw(st.integers(new_keys, new_keys + 90) if form == "shared" else st.integers(0, 90)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from((1, 2, 3))),
        head_dim=draw(st.sampled_from((1, 4, 16, 21))),
        value_dim=draw(st.sampled_from((1, 7, 16, 40))),
        integers=draw(st.booleans()),
        padded=draw(st.booleans()),
    )
    attributes: dict[str, Any] = {
        "softcap": draw(st.sampled_from((0.0, 0.0, 4.0))),
        "window": draw(st.sampled_from((-1, -1, 0, 1, 9, 70))),
        "causal": draw(st.integers(0, 1)),
        "alpha": draw(st.sampled_from((1.2, 1.5, 2.0))),
    }
    if shape.integers:
        # Whole numbers times a power of two give exact logits in float32, however large.
        attributes["scale"] = draw(st.sampled_from((0.125, 1.0, 256.0)))
    normalizer = draw(st.sampled_from(normalizers))
    sinks = draw(st.booleans())
    return make_case(normalizer, shape, draw(st.integers(0, 2**20)), draw(st.booleans()), sinks, **attributes)


def run_reference(case: Case) -> ContiguousOutput:
    attributes = dict(case.attributes)
    options = {name: attributes.pop(name) for name in ("alpha", "temperature_coefficients") if name in attributes}
    attributes["causal"] = bool(attributes.get("causal", 1))
    return attention(**case.inputs, normalizer=Normalizer(case.normalizer, **options), **attributes)  # type: ignore[arg-type]


def make_model(case: Case, outputs: tuple[str, ...] = OUTPUTS) -> onnx.ModelProto:
    """Return a model of one Attention node with its function; head counts and sizes are fixed, the rest is dynamic."""
    names = [name if name in case.inputs else "" for name in ATTENTION.input_names]
    produced = [name if name in outputs else "" for name in OUTPUTS]
    node = helper.make_node(
        ATTENTION.name, names, produced, domain=DOMAIN, normalizer=case.normalizer, **case.attributes
    )
    fixed = {
        dimension: size
        for name, array in case.inputs.items()
        for dimension, size in zip(SHAPES[name], array.shape, strict=True)
        if dimension not in DYNAMIC
    }
    fixed["statistics"] = case.attributes.get("stats_columns", DEFAULT_STATS_COLUMNS)

    def value_info(name: str) -> onnx.ValueInfoProto:
        dtype = np.dtype(np.float32) if name in OUTPUTS else case.inputs[name].dtype
        shape = [fixed.get(dimension, dimension) for dimension in SHAPES[name]]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)

    graph = helper.make_graph(
        [node], "call", [value_info(name) for name in case.inputs], [value_info(name) for name in outputs]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    attach_function(model)
    return model


def run(case: Case, kernel: bool, threads: int = 2) -> ContiguousOutput:
    return ContiguousOutput(*session(make_model(case), kernel, threads).run(list(OUTPUTS), case.inputs))


def assert_agrees(actual: ContiguousOutput, expected: ContiguousOutput, case: Case, tolerance: float = 1e-5) -> None:
    """Assert close outputs (relative to the largest value), equal presents, and close statistics, column by column."""
    scale = max(np.abs(expected.output).max(initial=0.0), 1e-3)
    slack = tolerance * slack_of_beta(case)
    np.testing.assert_allclose(actual.output, expected.output, rtol=slack, atol=slack * scale)
    np.testing.assert_array_equal(actual.present_key, expected.present_key.astype(np.float32))
    np.testing.assert_array_equal(actual.present_value, expected.present_value.astype(np.float32))
    stats = vanished_rows_alike(actual.stats, expected.output, expected.stats, case.normalizer)
    assert_statistics_agree(stats, expected.stats, case.normalizer, case.ties, tolerance)
