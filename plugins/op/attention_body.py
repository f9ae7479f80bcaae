"""`SharpAttention` as a model-local function of standard ONNX ops, for runtimes that lack our kernels."""

import numpy as np

from sharp.plugins.op import function_normalizers
from sharp.plugins.op.function_logits import in_sight, shape_logits
from sharp.plugins.op.function_normalizers import MaskedLogits
from sharp.plugins.op.node_list import NodeList


def write_attention(
    nodes: NodeList, normalizer: str, given: frozenset[str], coefficients: tuple[float, ...], stats_columns: int
) -> None:
    """Append to `nodes` the body of SharpAttention's function, with all its outputs.

    T is any float type; the arithmetic is float32. The statistics are always computed, but `stats` is zeros unless
    `collect_stats` is true.

    Args:
        nodes: the list that the body is appended to.
        normalizer: a normalizer's name; may be a user's.
        given: the names of the optional inputs that the nodes have.
        coefficients: adaptive_softmax's polynomial, highest power first.
        stats_columns: 4, or 5 with the sink's mass.

    Raises:
        SharpError: a user's normalizer is not installed, or its body fails.
    """
    past = _past(nodes, given)
    total = nodes.op("Add", past, nodes.dimension("key", 2))  # int64 [batch] or [1]
    if "total_lens" in given:
        total = nodes.op("Min", total, nodes.op("Cast", "total_lens", to=7))
    keys, values = (_present(nodes, part, given, past, total) for part in ("key", "value"))
    key_position = nodes.counting(nodes.dimension(keys, 2))
    valid = nodes.op("Less", key_position, nodes.unsqueeze(total, 1))  # [batch, keys]
    position = nodes.op("Add", nodes.unsqueeze(past, 1), nodes.counting(nodes.dimension("query", 2)))
    distance = nodes.op("Sub", key_position, nodes.unsqueeze(position, 1, 3))  # [batch, 1, queries, keys]
    visible = nodes.op("And", nodes.unsqueeze(valid, 1, 2), in_sight(nodes, distance))
    logits = shape_logits(nodes, _products(nodes, keys), distance if "alibi_slopes" in given else "")
    count = nodes.reduce("ReduceSum", nodes.op("Cast", visible, to=1))
    head_params = "head_params" if "head_params" in given else ""
    rows = MaskedLogits(logits, visible, count, head_params, function_normalizers.sinks_of(nodes, normalizer, given))
    result = function_normalizers.normalize(nodes, rows, normalizer, coefficients)
    # Values beyond a sequence's end may be NaN, and 0 * NaN is not 0.
    values = nodes.op("Where", nodes.unsqueeze(valid, 1, 3), nodes.op("Cast", values, to=1), nodes.constant(0.0))
    _output(nodes, result.weights, values)
    stats = function_normalizers.statistics(nodes, rows, result, normalizer, stats_columns)
    function_normalizers.write_stats(nodes, stats, "collect_stats" in given)


def _past(nodes: NodeList, given: frozenset[str]) -> str:
    """Return the number of keys before this call: int64 [batch] with a shared buffer, otherwise [1]."""
    if "past_lens" in given:
        return nodes.op("Cast", "past_lens", to=7)
    return nodes.dimension("past_key", 2) if "past_key" in given else nodes.constant([0])


def _present(nodes: NodeList, part: str, given: frozenset[str], past: str, total: str) -> str:
    """Append the output present_key or present_value [batch, kv_heads, keys, dim], and return its name.

    `part` is "key" or "value". `given`, the node's inputs, decides between no cache, concatenating, and a shared
    buffer. In a buffer, `past` and `total` name each sequence's tokens [batch] before and after the call.
    """
    output = f"present_{part}"
    if "past_key" not in given:
        return nodes.op("Identity", part, name=output)
    before = f"past_{part}"
    new = nodes.op("CastLike", part, before)
    if "past_lens" not in given:
        return nodes.op("Concat", before, new, axis=2, name=output)
    # Each place of the buffer takes the new key that belongs there, or keeps what it holds.
    place = nodes.counting(nodes.dimension(before, 2))
    source = nodes.op("Sub", place, nodes.unsqueeze(past, 1))  # [batch, capacity], index of the new key
    zero, last = nodes.constant(0, np.int64), nodes.op("Sub", nodes.dimension(part, 2), nodes.constant(1, np.int64))
    is_new = nodes.op("And", nodes.op("GreaterOrEqual", source, zero), nodes.op("LessOrEqual", source, last))
    is_new = nodes.op("And", is_new, nodes.op("Less", place, nodes.unsqueeze(total, 1)))
    nearest = nodes.op("Min", nodes.op("Max", source, zero), last)
    by_place = nodes.op("Transpose", new, perm=[0, 2, 1, 3])  # [batch, new_keys, kv_heads, dim]
    chosen = nodes.op("GatherND", by_place, nodes.unsqueeze(nearest, 2), batch_dims=1)
    by_head = nodes.op("Transpose", chosen, perm=[0, 2, 1, 3])  # [batch, kv_heads, capacity, dim]
    return nodes.op("Where", nodes.unsqueeze(is_new, 1, 3), by_head, before, name=output)


def _products(nodes: NodeList, keys: str) -> str:
    """Append query . key, float32 [batch, q_heads, queries, keys], and return its name; `keys` names the keys."""
    batch, q_heads, queries, head_dim = (nodes.dimension("query", axis) for axis in range(4))
    # The query heads that share a key head become rows of one matrix product.
    folded = nodes.reshape(nodes.op("Cast", "query", to=1), batch, nodes.dimension("key", 1), -1, head_dim)
    panel = nodes.op("Transpose", nodes.op("Cast", keys, to=1), perm=[0, 1, 3, 2])  # [batch, kv_heads, head_dim, keys]
    return nodes.reshape(nodes.op("MatMul", folded, panel), batch, q_heads, queries, -1)


def _output(nodes: NodeList, weights: str, values: str) -> None:
    """Append `output` (T): weights [batch, q_heads, queries, keys] times values [batch, kv_heads, keys, value_dim]."""
    batch, q_heads, queries = (nodes.dimension("query", axis) for axis in range(3))
    kv_heads, keys, value_dim = (nodes.dimension(values, axis) for axis in range(1, 4))
    folded = nodes.reshape(weights, batch, kv_heads, -1, keys)
    product = nodes.reshape(nodes.op("MatMul", folded, values), batch, q_heads, queries, value_dim)
    nodes.op("CastLike", product, "query", name="output")
