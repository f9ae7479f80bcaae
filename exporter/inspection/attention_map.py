"""The attention weights of one head, recomputed from the recorded inputs of its attention node."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.exporter.inspection.recording import LayerRecord
from sharp.plugins.op.reference import head_values, row_weights

MAP_CELLS = 512  # most rows and columns of a map


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one head, float64 [queries, key groups]; 0 where a query does not see the keys.

    Row r is the query at position `queries[r]`. For a text of more than `MAP_CELLS` tokens, the map has every
    `group`-th query, the last query among them, and a column is the largest weight in a group of `group` keys.
    """

    layer: int
    head: int
    queries: NDArray[np.int64]
    group: int
    weights: NDArray[np.float64]


def attention_map(record: LayerRecord, layer: int, head: int) -> AttentionMap:
    """Return the map of query head `head` in layer `layer`, whose record is `record`; both numbers are 0-based."""
    tokens = len(record.query)
    group = -(-tokens // MAP_CELLS)
    queries = np.arange(tokens - 1, -1, -group)[::-1]
    columns = -(-tokens // group)
    rows = np.zeros((len(queries), columns * group))
    for row, query in enumerate(queries):
        first, weights = attention_weights(record, head, int(query))
        rows[row, first : query + 1] = weights
    return AttentionMap(layer, head, queries, group, rows.reshape(len(queries), columns, group).max(-1))


def attention_weights(record: LayerRecord, head: int, query: int) -> tuple[int, NDArray[np.float64]]:
    """Return the first key that the query at position `query` sees, and the weights of the keys from there to `query`.

    The weights are float64 [query + 1 - first]; positions are 0-based. Their sum need not be 1, for example because a
    sink takes a share.
    """
    first = 0 if record.window < 0 else max(0, query + 1 - record.window)
    keys = record.key[first : query + 1, head * record.key.shape[1] // record.query.shape[1]].astype(np.float64)
    slope, parameters = head_values(head, record.alibi_slopes, record.head_params)
    weights, _ = row_weights(
        record.query[query, head].astype(np.float64),
        keys,
        np.arange(first, query + 1) - query,
        slope,
        parameters,
        normalizer=record.normalizer,
        scale=record.scale,
        softcap=record.softcap,
    )
    return first, weights
