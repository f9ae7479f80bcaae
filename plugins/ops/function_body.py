"""`PagedAttention` as a model-local function of standard ONNX ops, for runtimes that lack our kernels.

The keys of all sequences are gathered through the block table onto one axis and masked by sequence and position, so the
largest values are [q_heads, tokens, sequences * max_blocks * block_size].
"""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from sharp.plugins.errors import InputError
from sharp.plugins.ops import function_normalizers
from sharp.plugins.ops.function_normalizers import MaskedLogits
from sharp.plugins.ops.node_list import NodeList
from sharp.plugins.ops.schema import (
    ABSENT,
    DOMAIN,
    ICML2025_COEFFICIENTS,
    INPUTS,
    NORMALIZERS,
    OUTPUTS,
    PAGED_ATTENTION,
    REQUIRED_ATTRIBUTES,
    REQUIRED_INPUTS,
    VERSION,
    attribute_defaults,
)


def paged_attention_function(
    *,
    normalizer: str,
    has_head_params: bool = False,
    has_alibi_slopes: bool = False,
    has_collect_stats: bool = True,
    temperature_coefficients: Sequence[float] = ICML2025_COEFFICIENTS,
    opset: int = 23,
) -> onnx.FunctionProto:
    """The function for nodes with this normalizer and these optional inputs.

    The numeric attributes (scale, alpha, softcap, window, causal, entropy_threshold) stay attributes of the function;
    a body cannot branch on a string or on an absent input, hence the arguments. T is any float type; the arithmetic is
    float32. `stats` are zeros unless `collect_stats` is true; they are computed either way. The formal inputs end with
    the last optional one that is there, because TensorRT wants as many actual inputs as formal ones.

    Raises:
        InputError: the normalizer is unknown, or is ssa without head_params.
    """
    if normalizer not in NORMALIZERS:
        raise InputError(f"normalizer is {normalizer!r}; it must be one of {', '.join(NORMALIZERS)}")
    if normalizer == "ssa" and not has_head_params:
        raise InputError("ssa needs head_params (b, n): give the node its input 9")
    nodes = NodeList()
    key_rows = _store(nodes, "key", [0, 3, 1, 2], [0, 2, 3, 1])
    value_rows = _store(nodes, "value", [0, 2, 1, 3], [0, 2, 1, 3])
    slots, key_sequence, key_position, valid = _keys(nodes)
    distance, visible = _visibility(nodes, key_sequence, key_position, valid)
    logits = _logits(nodes, nodes.op("Gather", key_rows, slots), distance if has_alibi_slopes else "")
    rows = MaskedLogits(
        logits,
        nodes.unsqueeze(visible, 0),
        nodes.unsqueeze(nodes.reduce("ReduceSum", nodes.op("Cast", visible, to=1)), 0),
        "head_params",
    )
    result = function_normalizers.normalize(nodes, rows, normalizer, temperature_coefficients)
    values = nodes.op("Cast", nodes.op("Gather", value_rows, slots), to=1)
    # What an unused slot holds may be NaN, and 0 * NaN is not 0.
    values = nodes.op("Where", nodes.unsqueeze(valid, 1, 2), values, nodes.constant(0.0))
    _output(nodes, result.weights, values)
    sparse = normalizer in ("entmax", "relu", "relu2")
    stats = function_normalizers.statistics(nodes, rows, result, sparse)
    collect = "collect_stats" if has_collect_stats else nodes.op("Cast", nodes.constant(0.0), to=9)
    nodes.op("Where", collect, stats, nodes.constant(0.0), name="stats")
    return helper.make_function(
        DOMAIN,
        PAGED_ATTENTION,
        list(INPUTS[: _input_count([has_head_params, has_alibi_slopes, has_collect_stats])]),
        list(OUTPUTS),
        nodes.nodes,
        [helper.make_opsetid("", opset)],
        attributes=list(REQUIRED_ATTRIBUTES),
        attribute_protos=attribute_defaults(),
    )


def attach_function(model: onnx.ModelProto) -> None:
    """Add to `model` the function that its PagedAttention nodes need; an older one is replaced.

    Call it on the finished model: optimizers and version converters inline functions. The nodes are completed for
    readers that do less than ONNX Runtime: neither onnx's inliner nor TensorRT's parser applies the defaults that a
    function declares, so attributes that a node leaves out are written onto it; and TensorRT refuses a function call
    with an empty input, so an optional input that is left out before one that is given becomes an empty tensor.

    Raises:
        InputError: there is no such node, or the nodes differ in normalizer, coefficients or optional inputs.
    """
    nodes = [node for node in model.graph.node if (node.domain, node.op_type) == (DOMAIN, PAGED_ATTENTION)]
    forms = {_form(node) for node in nodes}
    if len(forms) != 1:
        found = "; ".join(sorted(map(str, forms))) or "no such node"
        raise InputError(f"all {DOMAIN}.{PAGED_ATTENTION} nodes of a model must be of one form, found: {found}")
    (form,) = forms
    normalizer, coefficients, head_params, alibi_slopes, collect_stats = form
    opsets = {imported.domain: imported.version for imported in model.opset_import}
    function = paged_attention_function(
        normalizer=normalizer,
        has_head_params=head_params,
        has_alibi_slopes=alibi_slopes,
        has_collect_stats=collect_stats,
        temperature_coefficients=coefficients,
        opset=opsets[""],
    )
    others = [other for other in model.functions if (other.domain, other.name) != (DOMAIN, PAGED_ATTENTION)]
    del model.functions[:]
    model.functions.extend([*others, function])
    for node in nodes:
        _complete_inputs(model.graph, node, _input_count([head_params, alibi_slopes, collect_stats]))
        present = {attribute.name for attribute in node.attribute}
        node.attribute.extend(default for default in attribute_defaults() if default.name not in present)
    if DOMAIN not in opsets:
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def _input_count(optional_inputs: Sequence[bool]) -> int:
    """Inputs up to the last optional one that is there."""
    return REQUIRED_INPUTS + max((index + 1 for index, given in enumerate(optional_inputs) if given), default=0)


def _complete_inputs(graph: onnx.GraphProto, node: onnx.NodeProto, count: int) -> None:
    inputs = [name or ABSENT for name in node.input[:count]]
    del node.input[:]
    node.input.extend(inputs)
    if ABSENT in inputs and all(initializer.name != ABSENT for initializer in graph.initializer):
        graph.initializer.append(helper.make_tensor(ABSENT, onnx.TensorProto.FLOAT, [0], []))


def _form(node: onnx.NodeProto) -> tuple[str, tuple[float, ...], bool, bool, bool]:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    given = [len(node.input) > position and node.input[position] not in ("", ABSENT) for position in (9, 10, 11)]
    normalizer = attributes.get("normalizer", b"").decode()
    coefficients = tuple(attributes.get("temperature_coefficients", ICML2025_COEFFICIENTS))
    return normalizer, coefficients if normalizer == "adaptive_softmax" else (), given[0], given[1], given[2]


def _store(nodes: NodeList, name: str, to_rows: list[int], from_rows: list[int]) -> str:
    """Append the update of a cache; returns its rows [blocks * block_size, kv_heads, dim], one per slot."""
    cache = f"{name}_cache"
    by_slot = nodes.op("Transpose", cache, perm=to_rows)  # [blocks, block_size, kv_heads, dim]
    row_shape = [nodes.dimension(name, 1), nodes.dimension(name, 2)]
    rows = nodes.reshape(by_slot, -1, *row_shape)
    slot_count = nodes.dimension(rows, 0)
    # Slot -1 goes to one row past the end, cut off again: ScatterND takes no index outside its data.
    spare = nodes.op("CastLike", nodes.op("ConstantOfShape", nodes.shape(1, *row_shape)), cache)
    extended = nodes.op("Concat", rows, spare, axis=0)
    slots = nodes.op("Cast", "slot_mapping", to=7)
    dropped = nodes.op("Less", slots, nodes.constant(0, np.int64))
    target = nodes.unsqueeze(nodes.op("Where", dropped, slot_count, slots), 1)
    updated = nodes.op("ScatterND", extended, target, nodes.op("CastLike", name, cache))
    kept = nodes.op("Slice", updated, nodes.constant([0]), slot_count, nodes.constant([0]))
    whole = nodes.op("Reshape", kept, nodes.op("Shape", by_slot))
    nodes.op("Transpose", whole, perm=from_rows, name=f"{cache}_out")
    return kept


def _keys(nodes: NodeList) -> tuple[str, str, str, str]:
    """Every key that the block table can name: its slot, sequence, position and whether it exists, each [keys]."""
    table = nodes.op("Cast", "block_table", to=7)
    sequences, max_blocks = nodes.dimension(table, 0), nodes.dimension(table, 1)
    block_size = nodes.dimension("value_cache", 2)
    offset = nodes.counting(block_size)
    first_slot = nodes.op("Mul", nodes.op("Max", table, nodes.constant(0, np.int64)), block_size)
    slots = nodes.op("Add", nodes.unsqueeze(first_slot, 2), offset)  # [sequences, max_blocks, block_size]
    shape = nodes.op("Shape", slots)
    block_start = nodes.op("Mul", nodes.counting(max_blocks), block_size)
    position = nodes.op("Expand", nodes.op("Add", nodes.unsqueeze(block_start, 1), offset), shape)
    sequence = nodes.op("Expand", nodes.unsqueeze(nodes.counting(sequences), 1, 2), shape)
    total = nodes.op("Add", nodes.op("Cast", "context_lens", to=7), _query_lengths(nodes))
    mapped = nodes.op("GreaterOrEqual", nodes.unsqueeze(table, 2), nodes.constant(0, np.int64))
    valid = nodes.op("And", mapped, nodes.op("Less", position, nodes.unsqueeze(total, 1, 2)))
    flat = [nodes.op("Reshape", value, nodes.constant([-1])) for value in (slots, sequence, position, valid)]
    return flat[0], flat[1], flat[2], flat[3]


def _query_bounds(nodes: NodeList) -> tuple[str, str]:
    """First and end token of each sequence, int64 [sequences]."""
    bounds = nodes.op("Cast", "query_start", to=7)
    axis = nodes.constant([0])
    starts = nodes.op("Slice", bounds, nodes.constant([0]), nodes.constant([-1]), axis)
    ends = nodes.op("Slice", bounds, nodes.constant([1]), nodes.dimension(bounds, 0), axis)
    return starts, ends


def _query_lengths(nodes: NodeList) -> str:
    starts, ends = _query_bounds(nodes)
    return nodes.op("Sub", ends, starts)


def _visibility(nodes: NodeList, key_sequence: str, key_position: str, valid: str) -> tuple[str, str]:
    """Distance j - p, int64 [tokens, keys], and whether token sees key, bool [tokens, keys]."""
    starts, ends = _query_bounds(nodes)
    token = nodes.counting(nodes.dimension("query", 0))
    past = nodes.op("GreaterOrEqual", nodes.unsqueeze(token, 1), nodes.unsqueeze(ends, 0))
    sequence = nodes.op("ReduceSum", nodes.op("Cast", past, to=7), nodes.constant([1]), keepdims=0)
    # Position = token - first token of its sequence + context.
    offsets = nodes.op("Sub", nodes.op("Cast", "context_lens", to=7), starts)
    position = nodes.op("Add", token, nodes.op("Gather", offsets, sequence))
    distance = nodes.op("Sub", nodes.unsqueeze(key_position, 0), nodes.unsqueeze(position, 1))
    zero = nodes.constant(0, np.int64)
    window = nodes.attribute("window", "int")
    windowed = nodes.op("GreaterOrEqual", window, zero)
    causal = nodes.op("Cast", nodes.attribute("causal", "int"), to=9)
    sees_future = nodes.op("Not", nodes.op("Or", causal, windowed))
    not_future = nodes.op("Or", sees_future, nodes.op("LessOrEqual", distance, zero))
    near = nodes.op("Greater", nodes.op("Add", distance, window), zero)
    in_window = nodes.op("Or", nodes.op("Not", windowed), near)
    same = nodes.op("Equal", nodes.unsqueeze(sequence, 1), nodes.unsqueeze(key_sequence, 0))
    own = nodes.op("And", same, nodes.unsqueeze(valid, 0))
    return distance, nodes.op("And", own, nodes.op("And", not_future, in_window))


def _logits(nodes: NodeList, keys: str, distance: str) -> str:
    """Logits float32 [q_heads, tokens, keys] after scale, soft cap and, when `distance` is given, position bias."""
    tokens, q_heads = nodes.dimension("query", 0), nodes.dimension("query", 1)
    kv_heads, head_dim = nodes.dimension("key", 1), nodes.dimension("key", 2)
    grouped = nodes.reshape(nodes.op("Cast", "query", to=1), tokens, kv_heads, -1, head_dim)
    by_head = nodes.op("Transpose", grouped, perm=[1, 2, 0, 3])  # [kv_heads, group, tokens, head_dim]
    folded = nodes.reshape(by_head, kv_heads, -1, head_dim)
    panel = nodes.op("Transpose", nodes.op("Cast", keys, to=1), perm=[1, 2, 0])  # [kv_heads, head_dim, keys]
    scaled = nodes.op("Mul", nodes.op("MatMul", folded, panel), nodes.attribute("scale", "float"))
    logits = nodes.reshape(scaled, q_heads, tokens, -1)
    zero = nodes.constant(0.0)
    softcap = nodes.attribute("softcap", "float")
    capped_at = nodes.op("Greater", softcap, zero)
    cap = nodes.op("Where", capped_at, softcap, nodes.constant(1.0))
    capped = nodes.op("Mul", cap, nodes.op("Tanh", nodes.op("Div", logits, cap)))
    logits = nodes.op("Where", capped_at, capped, logits)
    if distance:
        slopes = nodes.unsqueeze("alibi_slopes", 1, 2)
        logits = nodes.op("Add", logits, nodes.op("Mul", slopes, nodes.op("Cast", distance, to=1)))
    return logits


def _output(nodes: NodeList, weights: str, values: str) -> None:
    """`output` = weights [q_heads, tokens, keys] times values [keys, kv_heads, value_dim], in the query's type."""
    tokens, q_heads = nodes.dimension("query", 0), nodes.dimension("query", 1)
    kv_heads, value_dim = nodes.dimension("value", 1), nodes.dimension("value", 2)
    keys = nodes.dimension(values, 0)
    folded = nodes.reshape(weights, kv_heads, -1, keys)
    product = nodes.op("MatMul", folded, nodes.op("Transpose", values, perm=[1, 0, 2]))
    by_head = nodes.reshape(product, q_heads, tokens, value_dim)
    nodes.op("CastLike", nodes.op("Transpose", by_head, perm=[1, 0, 2]), "query", name="output")
