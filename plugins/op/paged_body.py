"""`PagedAttention` as a model-local function of standard ONNX ops, for runtimes that lack our kernels.

The keys of all sequences are gathered through the block table onto one axis and masked by sequence and position, so the
largest values are [q_heads, tokens, sequences * max_blocks * block_size].
"""

import numpy as np

from sharp.plugins.op import function_normalizers
from sharp.plugins.op.function_logits import in_sight, shape_logits
from sharp.plugins.op.function_normalizers import MaskedLogits
from sharp.plugins.op.node_list import NodeList


def write_paged_attention(
    nodes: NodeList, normalizer: str, given: frozenset[str], coefficients: tuple[float, ...], stats_columns: int
) -> None:
    """Append to `nodes` the body of PagedAttention's function, with the outputs output, caches and stats.

    T is any float type; the arithmetic is float32. The statistics are always computed, but `stats` is zeros unless
    `collect_stats` is true. Caches with scales are not supported.

    Args:
        nodes: the list that the body is appended to.
        normalizer: a normalizer's name; may be a user's.
        given: the names of the optional inputs that the nodes have.
        coefficients: adaptive_softmax's polynomial, highest power first.
        stats_columns: 4, or 5 with the sink's mass.

    Raises:
        SharpError: a user's normalizer is not installed, or its body fails.
    """
    key_rows = _store(nodes, "key", [0, 3, 1, 2], [0, 2, 3, 1])
    value_rows = _store(nodes, "value", [0, 2, 1, 3], [0, 2, 1, 3])
    slots, key_sequence, key_position, valid = _keys(nodes)
    distance, visible = _visibility(nodes, key_sequence, key_position, valid)
    products = _products(nodes, nodes.op("Gather", key_rows, slots))
    logits = shape_logits(nodes, products, distance if "alibi_slopes" in given else "")
    rows = MaskedLogits(
        logits,
        nodes.unsqueeze(visible, 0),
        nodes.unsqueeze(nodes.reduce("ReduceSum", nodes.op("Cast", visible, to=1)), 0),
        "head_params" if "head_params" in given else "",
        function_normalizers.sinks_of(nodes, normalizer, given),
    )
    result = function_normalizers.normalize(nodes, rows, normalizer, coefficients)
    values = nodes.op("Cast", nodes.op("Gather", value_rows, slots), to=1)
    # An unused slot may hold NaN, and 0 * NaN is not 0.
    values = nodes.op("Where", nodes.unsqueeze(valid, 1, 2), values, nodes.constant(0.0))
    _output(nodes, result.weights, values)
    stats = function_normalizers.statistics(nodes, rows, result, normalizer, stats_columns)
    by_token = nodes.op("Transpose", stats, perm=[1, 0, 2])
    function_normalizers.write_stats(nodes, by_token, "collect_stats" in given)


def _store(nodes: NodeList, name: str, to_rows: list[int], from_rows: list[int]) -> str:
    """Append the update of a cache, and return the name of its rows [blocks * block_size, kv_heads, dim].

    `name` is "key" or "value". `to_rows` permutes the cache's axes to [blocks, block_size, kv_heads, dim], and
    `from_rows` back.
    """
    cache = f"{name}_cache"
    by_slot = nodes.op("Transpose", cache, perm=to_rows)  # [blocks, block_size, kv_heads, dim]
    row_shape = [nodes.dimension(name, 1), nodes.dimension(name, 2)]
    rows = nodes.reshape(by_slot, -1, *row_shape)
    slot_count = nodes.dimension(rows, 0)
    # Slot -1 is stored in a spare row past the end, which is then cut off: ScatterND takes no index outside its data.
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
    """Return slot, sequence, position and existence of every key that the block table can name, each [keys]."""
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
    """Return the first and the end token of each sequence, int64 [sequences] each."""
    bounds = nodes.op("Cast", "query_start", to=7)
    axis = nodes.constant([0])
    starts = nodes.op("Slice", bounds, nodes.constant([0]), nodes.constant([-1]), axis)
    ends = nodes.op("Slice", bounds, nodes.constant([1]), nodes.dimension(bounds, 0), axis)
    return starts, ends


def _query_lengths(nodes: NodeList) -> str:
    """Append the number of new tokens of each sequence, int64 [sequences], and return its name."""
    starts, ends = _query_bounds(nodes)
    return nodes.op("Sub", ends, starts)


def _visibility(nodes: NodeList, key_sequence: str, key_position: str, valid: str) -> tuple[str, str]:
    """Append the distances j - p, int64 [tokens, keys], and whether each token sees each key, bool; return both names.

    `key_sequence` and `key_position` [keys] name each key's sequence and position, and `valid` whether its slot is in
    use.
    """
    starts, ends = _query_bounds(nodes)
    token = nodes.counting(nodes.dimension("query", 0))
    past = nodes.op("GreaterOrEqual", nodes.unsqueeze(token, 1), nodes.unsqueeze(ends, 0))
    sequence = nodes.op("ReduceSum", nodes.op("Cast", past, to=7), nodes.constant([1]), keepdims=0)
    # A token's position is its index in its sequence's new tokens plus the sequence's context length.
    offsets = nodes.op("Sub", nodes.op("Cast", "context_lens", to=7), starts)
    position = nodes.op("Add", token, nodes.op("Gather", offsets, sequence))
    distance = nodes.op("Sub", nodes.unsqueeze(key_position, 0), nodes.unsqueeze(position, 1))
    same = nodes.op("Equal", nodes.unsqueeze(sequence, 1), nodes.unsqueeze(key_sequence, 0))
    own = nodes.op("And", same, nodes.unsqueeze(valid, 0))
    return distance, nodes.op("And", own, in_sight(nodes, distance))


def _products(nodes: NodeList, keys: str) -> str:
    """Append query . key, float32 [q_heads, tokens, keys], and return its name.

    `keys` names the keys, [keys, kv_heads, head_dim].
    """
    tokens, q_heads = nodes.dimension("query", 0), nodes.dimension("query", 1)
    kv_heads, head_dim = nodes.dimension("key", 1), nodes.dimension("key", 2)
    grouped = nodes.reshape(nodes.op("Cast", "query", to=1), tokens, kv_heads, -1, head_dim)
    by_head = nodes.op("Transpose", grouped, perm=[1, 2, 0, 3])  # [kv_heads, group, tokens, head_dim]
    folded = nodes.reshape(by_head, kv_heads, -1, head_dim)
    panel = nodes.op("Transpose", nodes.op("Cast", keys, to=1), perm=[1, 2, 0])  # [kv_heads, head_dim, keys]
    return nodes.reshape(nodes.op("MatMul", folded, panel), q_heads, tokens, -1)


def _output(nodes: NodeList, weights: str, values: str) -> None:
    """Append `output`, of the query's type: weights [q_heads, tokens, keys] @ values [keys, kv_heads, value_dim]."""
    tokens, q_heads = nodes.dimension("query", 0), nodes.dimension("query", 1)
    kv_heads, value_dim = nodes.dimension("value", 1), nodes.dimension("value", 2)
    keys = nodes.dimension(values, 0)
    folded = nodes.reshape(weights, kv_heads, -1, keys)
    product = nodes.op("MatMul", folded, nodes.op("Transpose", values, perm=[1, 0, 2]))
    by_head = nodes.reshape(product, q_heads, tokens, value_dim)
    nodes.op("CastLike", nodes.op("Transpose", by_head, perm=[1, 0, 2]), "query", name="output")
