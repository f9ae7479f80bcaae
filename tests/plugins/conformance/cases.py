"""Random calls of PagedAttention, and the ways to run one: reference, ONNX Runtime with and without the kernel."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import strategies as st
from onnx import helper

from sharp.plugins import library_path
from sharp.plugins.op import e4m3
from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS, HEAD_PARAMETERS, STATS_COLUMNS_WITH_SINK, WITHOUT_SINK
from sharp.plugins.op.function_body import attach_function
from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.op.reference import AttentionOutput, paged_attention
from sharp.plugins.op.schema import DOMAIN, INPUTS, NORMALIZERS, OUTPUTS, SCALES, VERSION

FLOATS = ("query", "key", "value", "key_cache", "value_cache", "head_params", "alibi_slopes")
SHAPES = {
    "query": ["tokens", "q_heads", "head_dim"],
    "key": ["tokens", "kv_heads", "head_dim"],
    "value": ["tokens", "kv_heads", "value_dim"],
    "key_cache": ["blocks", "kv_heads", "head_dim", "block_size"],
    "value_cache": ["blocks", "kv_heads", "block_size", "value_dim"],
    "slot_mapping": ["tokens"],
    "block_table": ["sequences", "max_blocks"],
    "query_start": ["sequences_plus_1"],
    "context_lens": ["sequences"],
    "head_params": ["q_heads", "parameters"],
    "alibi_slopes": ["q_heads"],
    "collect_stats": [],
    "output": ["tokens", "q_heads", "value_dim"],
    "key_cache_out": ["blocks", "kv_heads", "head_dim", "block_size"],
    "value_cache_out": ["blocks", "kv_heads", "block_size", "value_dim"],
    "stats": ["tokens", "q_heads", "statistics"],
}


@dataclass(frozen=True, repr=False)
class Case:
    """Inputs and attributes of one call of PagedAttention or Attention."""

    normalizer: str
    inputs: dict[str, np.ndarray]
    attributes: dict[str, Any] = field(default_factory=dict)
    made_by: str = ""
    ties: bool = False

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.made_by)  # by default, hypothesis would print every array

    def with_inputs(self, **changed: np.ndarray) -> "Case":
        return replace(self, inputs={**self.inputs, **changed})


@dataclass(frozen=True)
class Shape:
    """The sizes of a random case. `sequences` holds (context, new tokens) of each sequence."""

    sequences: tuple[tuple[int, int], ...] = ((0, 5), (20, 1), (3, 0), (33, 3))
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 8
    value_dim: int = 12
    block_size: int = 16
    integers: bool = False
    drop_slots: bool = False
    holes: bool = False


def make_case(
    normalizer: str,
    shape: Shape = Shape(),
    seed: int = 0,
    alibi: bool = False,
    sinks: bool = False,
    **attributes: Any,
) -> Case:
    """Return a random case with a shuffled block table, and with NaN in unused blocks and unused offsets of blocks."""
    rng = np.random.default_rng(seed)
    sizes = [-(-(context + new) // shape.block_size) for context, new in shape.sequences]
    blocks = sum(sizes) + 2
    tokens = sum(new for _, new in shape.sequences)
    order = iter(rng.permutation(blocks).tolist())
    table = np.full((len(sizes), max(sizes) + 1), -1, dtype=np.int32)
    key_cache = np.full((blocks, shape.kv_heads, shape.head_dim, shape.block_size), np.nan, dtype=np.float32)
    value_cache = np.full((blocks, shape.kv_heads, shape.block_size, shape.value_dim), np.nan, dtype=np.float32)
    slots = []
    for sequence, (context, new) in enumerate(shape.sequences):
        table[sequence, : sizes[sequence]] = [next(order) for _ in range(sizes[sequence])]
        for position in range(context + new):
            block, offset = table[sequence, position // shape.block_size], position % shape.block_size
            key_cache[block, :, :, offset] = random_numbers(rng, shape.integers, (shape.kv_heads, shape.head_dim))
            value_cache[block, :, offset] = rng.standard_normal((shape.kv_heads, shape.value_dim))
            if position >= context:
                slots.append(int(block) * shape.block_size + offset)
    if shape.drop_slots:
        slots = [-1 if rng.random() < 0.3 else slot for slot in slots]
    if shape.holes:
        table[rng.random(table.shape) < 0.3] = -1
    q_heads = shape.kv_heads * shape.group
    inputs = {
        "query": random_numbers(rng, shape.integers, (tokens, q_heads, shape.head_dim)),
        "key": random_numbers(rng, shape.integers, (tokens, shape.kv_heads, shape.head_dim)),
        "value": rng.standard_normal((tokens, shape.kv_heads, shape.value_dim)).astype(np.float32),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": np.array(slots, dtype=np.int32),
        "block_table": table,
        "query_start": np.cumsum([0, *(new for _, new in shape.sequences)], dtype=np.int32),
        "context_lens": np.array([context for context, _ in shape.sequences], dtype=np.int32),
    }
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
    """Generate calls with every option: odd lengths, several sequences, windows, holes, logits up to 10,000."""
    shape = Shape(
        sequences=tuple(
            draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 7)), min_size=1, max_size=3).filter(_has_work))
        ),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from((1, 2, 3, 8))),
        head_dim=draw(st.sampled_from((1, 4, 16, 21))),
        value_dim=draw(st.sampled_from((1, 7, 16, 40))),
        block_size=draw(st.sampled_from((16, 16, 32, 64, 1, 5))),
        integers=draw(st.booleans()),
        drop_slots=draw(st.booleans()),
        holes=draw(st.booleans()),
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


def _has_work(sequences: list[tuple[int, int]]) -> bool:
    return sum(new for _, new in sequences) > 0


def random_numbers(rng: np.random.Generator, integers: bool, size: tuple[int, ...]) -> np.ndarray:
    """Return random float32 numbers: small whole numbers if `integers`, otherwise normally distributed."""
    values = rng.integers(-3, 4, size) if integers else rng.standard_normal(size)
    return values.astype(np.float32)


def random_head_params(rng: np.random.Generator, normalizer: str, q_heads: int, sinks: bool) -> np.ndarray | None:
    """Return the normalizer's own columns and a column of sinks: usual, absent, and far above or below all logits.

    The columns of normalizers without a sink are optional. They are returned only with `sinks`.
    """
    if normalizer in WITHOUT_SINK:
        own = len(HEAD_PARAMETERS[normalizer])
        return rng.uniform(-0.5, 1.5, (q_heads, own)).astype(np.float32) if sinks else None
    columns = []
    if normalizer == "ssa":
        columns.append(rng.uniform((0.3, 0.2), (2.0, 2.5), (q_heads, 2)))
    if sinks:
        unusual = rng.choice([-np.inf, -1e4, 1e4], (q_heads, 1))
        columns.append(np.where(rng.random((q_heads, 1)) < 0.3, unusual, rng.integers(-16, 17, (q_heads, 1)) / 8))
    return np.concatenate(columns, 1).astype(np.float32) if columns else None


def columns_with(sinks: bool) -> dict[str, int]:
    """Return the attribute that requests the sink's mass among the statistics, if a case has sinks."""
    return {"stats_columns": STATS_COLUMNS_WITH_SINK} if sinks else {}


def int8_case(case: Case) -> Case:
    """Return the case with int8 caches and a scale for each block and head. Unused elements hold random integers."""
    generator = np.random.default_rng(1)
    inputs = dict(case.inputs)
    for name, scale_name in zip(("key_cache", "value_cache"), SCALES, strict=True):
        numbers = np.nan_to_num(inputs[name], nan=9.0)
        scale = (np.abs(numbers).max((2, 3)).clip(1e-6) / 127 * generator.uniform(0.5, 1.0, numbers.shape[:2])).astype(
            np.float32
        )
        inputs[name] = np.clip(np.rint(numbers / scale[:, :, None, None]), -127, 127).astype(np.int8)
        inputs[scale_name] = scale
    return replace(case, inputs=inputs)


def fp8_case(case: Case, raised: tuple[int, ...] = (1, 2, 2**12)) -> Case:
    """Return the case with fp8 caches and a scale, a power of two, for each block and head. Unused elements hold NaN.

    Each scale is multiplied by one of `raised` above the smallest scale that suffices. With 2^12, numbers become
    subnormal.
    """
    generator = np.random.default_rng(1)
    inputs = dict(case.inputs)
    for name, scale_name in zip(("key_cache", "value_cache"), SCALES, strict=True):
        largest = np.nan_to_num(np.abs(inputs[name])).max((2, 3))
        scale = e4m3.scale_of(largest) * generator.choice(raised, largest.shape).astype(np.float32)
        numbers = inputs[name] / np.where(scale > 0, scale, 1)[:, :, None, None]
        inputs[name] = np.where(np.isnan(numbers), 0x7F, e4m3.encode(numbers)).astype(np.uint8)
        inputs[scale_name] = scale
    return replace(case, inputs=inputs)


def run_reference(case: Case) -> AttentionOutput:
    attributes = dict(case.attributes)
    normalizer = Normalizer(
        case.normalizer,
        alpha=attributes.pop("alpha", 1.5),
        **{name: attributes.pop(name) for name in ("temperature_coefficients",) if name in attributes},
    )
    attributes["causal"] = bool(attributes.get("causal", 1))
    return paged_attention(**case.inputs, normalizer=normalizer, **attributes)  # type: ignore[arg-type]


def make_model(case: Case, *, body: bool = True) -> onnx.ModelProto:
    """Return a model of one PagedAttention node, with its function if `body`.

    Head counts and sizes are fixed; the other dimensions are dynamic.
    """
    names = [name if name in case.inputs else "" for name in INPUTS]
    node = helper.make_node(
        "PagedAttention", names, list(OUTPUTS), domain=DOMAIN, normalizer=case.normalizer, **case.attributes
    )
    dynamic = ("tokens", "blocks", "sequences", "sequences_plus_1", "max_blocks")
    fixed = {
        dimension: size
        for name, array in case.inputs.items()
        for dimension, size in zip(SHAPES[name], array.shape, strict=True)
        if dimension not in dynamic
    }
    fixed["statistics"] = case.attributes.get("stats_columns", DEFAULT_STATS_COLUMNS)

    def value_info(name: str) -> onnx.ValueInfoProto:
        dtype = np.float32 if name in (*FLOATS, *OUTPUTS) else case.inputs[name].dtype
        shape = [fixed.get(dimension, dimension) for dimension in SHAPES[name]]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    graph = helper.make_graph(
        [node], "call", [value_info(name) for name in case.inputs], [value_info(name) for name in OUTPUTS]
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if body:
        attach_function(model)
    return model


def session(model: onnx.ModelProto, kernel: bool, threads: int = 2) -> ort.InferenceSession:
    """Return a session that runs our kernel, or a session of stock ONNX Runtime, which inlines the function."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if kernel:
        options.register_custom_ops_library(library_path("onnxruntime"))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(case: Case, kernel: bool, threads: int = 2) -> AttentionOutput:
    return AttentionOutput(*session(make_model(case), kernel, threads).run(list(OUTPUTS), case.inputs))


def assert_agrees(actual: AttentionOutput, expected: AttentionOutput, case: Case, tolerance: float = 1e-5) -> None:
    """Assert close outputs (relative to the largest value), equal caches, and close statistics, column by column."""
    scale = max(np.abs(expected.output).max(initial=0.0), 1e-3)
    slack = tolerance * slack_of_beta(case)
    np.testing.assert_allclose(actual.output, expected.output, rtol=slack, atol=slack * scale)
    np.testing.assert_array_equal(actual.key_cache, expected.key_cache.astype(np.float32))
    np.testing.assert_array_equal(actual.value_cache, expected.value_cache.astype(np.float32))
    stats = vanished_rows_alike(actual.stats, expected.output, expected.stats, case.normalizer)
    assert_statistics_agree(stats, expected.stats, case.normalizer, case.ties, tolerance)


def slack_of_beta(case: Case) -> int:
    """Return the factor by which the tolerance of an output grows because beta is rounded.

    The rounding error of beta, times a large logit, shifts keys against a sink or against each other. Cases with ties
    have large logits, whose small differences come only from a sink or from slopes of ALiBi.
    """
    fractions = {"head_params", "alibi_slopes"} & {*case.inputs}
    return 20 if case.normalizer == "adaptive_softmax" and fractions and case.ties else 1


def vanished_rows_alike(
    stats: np.ndarray, expected_output: np.ndarray, expected_stats: np.ndarray, normalizer: str
) -> np.ndarray:
    """Return `stats` with the expected entropy in rows of sigmoid whose weights all underflow float32.

    In float32 such a row has no entropy.
    """
    if normalizer != "sigmoid":
        return stats
    vanished = np.abs(expected_output).max(-1, initial=0.0) < 1e-30
    assert (stats[vanished, 0] >= 0).all()
    return np.where(vanished[..., None] & (np.arange(stats.shape[-1]) == 0), expected_stats, stats)


def assert_statistics_agree(
    actual: np.ndarray, expected: np.ndarray, normalizer: str, ties: bool, tolerance: float
) -> None:
    """Assert that statistics agree, column by column."""
    entropy, support, beta, spread = (actual[..., column] for column in range(DEFAULT_STATS_COLUMNS))
    np.testing.assert_allclose(entropy, expected[..., 0], rtol=5 * tolerance, atol=5 * tolerance)
    # A key within a rounding error of the threshold may fall on either side, and so may any number of equal keys. The
    # logits of ties are exact, and so is 0, the threshold of relu and softpick.
    slacks = {"entmax": 1e9 if ties else 1, "relu": int(not ties), "relu2": int(not ties), "softpick": int(not ties)}
    slack = slacks.get(normalizer, 0)
    np.testing.assert_allclose(support, expected[..., 1], rtol=0, atol=slack)
    np.testing.assert_allclose(beta, expected[..., 2], rtol=5 * tolerance)
    np.testing.assert_allclose(spread, expected[..., 3], rtol=tolerance, atol=tolerance)
    # The mass of the sink, if there is a column for it, has the rounding error of an exponential, like any weight.
    sink, of_reference = (stats[..., DEFAULT_STATS_COLUMNS:] for stats in (actual, expected))
    np.testing.assert_allclose(sink, of_reference, rtol=0, atol=5 * tolerance)
