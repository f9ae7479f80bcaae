"""The op `SharpAttention` in float64 numpy; its rows are computed by the reference of `PagedAttention`."""

from dataclasses import astuple, dataclass

import numpy as np

from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS, check_attributes
from sharp.plugins.op.normalizers import Normalizer
from sharp.plugins.op.reference import Floats, Ints, attend, head_values, visible_keys


@dataclass(frozen=True)
class ContiguousOutput:
    """The four outputs of `SharpAttention`, all float64.

    Attributes:
        output: [batch, q_heads, queries, value_dim].
        present_key: [batch, kv_heads, slots, head_dim].
        present_value: [batch, kv_heads, slots, value_dim].
        stats: [batch, q_heads, queries, stats_columns]; zeros if no statistics are collected.
    """

    output: Floats
    present_key: Floats
    present_value: Floats
    stats: Floats


def present(new: Floats, past: Floats | None, past_lens: Ints | None, totals: Ints) -> Floats:
    """Return past and new keys (or values) joined, float64 [batch, kv_heads, slots, dim]. The inputs are not modified.

    Args:
        new: [batch, kv_heads, new_keys, dim].
        past: [batch, kv_heads, capacity, dim]; None: the result is `new`.
        past_lens: [batch], the filled places of a shared buffer `past`, which new keys are written behind; None: `new`
            is appended to `past` along axis 2.
        totals: [batch], the number of keys of each sequence that count. Only in a shared buffer are later keys dropped.

    Raises:
        IndexError: a new key that counts does not fit the capacity.
    """
    if past is None:
        return new.astype(np.float64)
    if past_lens is None:
        return np.concatenate([past, new], axis=2).astype(np.float64)
    buffer = past.astype(np.float64)
    for sequence, (first, total) in enumerate(zip(past_lens, totals, strict=True)):
        places = np.arange(first, min(first + new.shape[2], total))
        buffer[sequence][:, places] = new[sequence][:, places - first]
    return buffer


def attention(
    query: Floats,
    key: Floats,
    value: Floats,
    past_key: Floats | None = None,
    past_value: Floats | None = None,
    past_lens: Ints | None = None,
    total_lens: Ints | None = None,
    head_params: Floats | None = None,
    alibi_slopes: Floats | None = None,
    collect_stats: bool = False,
    *,
    normalizer: Normalizer,
    scale: float,
    softcap: float = 0.0,
    window: int = -1,
    causal: bool = True,
    stats_columns: int = DEFAULT_STATS_COLUMNS,
) -> ContiguousOutput:
    """Compute `SharpAttention` in float64. The inputs are not modified, and their sizes are not checked.

    Args:
        query: [batch, q_heads, queries, head_dim], positions applied.
        key: [batch, kv_heads, new_keys, head_dim]; kv_heads divides q_heads.
        value: [batch, kv_heads, new_keys, value_dim].
        past_key: [batch, kv_heads, capacity, head_dim], given with `past_value`.
        past_value: [batch, kv_heads, capacity, value_dim].
        past_lens: [batch], the filled places if the past is a shared buffer.
        total_lens: [batch], the number of keys that are not padding, past included; None: all.
        head_params: [q_heads, P], the normalizer's own columns, then the sink's column if there are sinks.
        alibi_slopes: [q_heads].
        collect_stats: whether to return statistics; otherwise `stats` is zeros.
        normalizer: the normalizer with its parameters.
        scale: the factor of query . key.
        softcap: c in c tanh(z / c), 0 = off.
        window: a query sees the last `window` keys up to its own position; -1 = off.
        causal: whether a query sees only keys up to its own position.
        stats_columns: 4, or 5 with the sink's mass.

    Raises:
        InputError: an attribute is outside its limits, or the normalizer does not take these `head_params`.
    """
    check_attributes({"scale": scale, "softcap": softcap, "window": window, "stats_columns": stats_columns})
    batch, q_heads, queries, _ = query.shape
    group = q_heads // key.shape[1]
    past = np.zeros(batch, dtype=np.int64) if past_key is None else np.full(batch, past_key.shape[2])
    if past_lens is not None:
        past = past_lens.astype(np.int64)
    totals = past + key.shape[2]
    if total_lens is not None:
        totals = np.minimum(totals, total_lens)
    keys = present(key, past_key, past_lens, totals)
    values = present(value, past_value, past_lens, totals)
    query = query.astype(np.float64)
    output = np.zeros((batch, q_heads, queries, value.shape[3]))
    stats = np.zeros((batch, q_heads, queries, stats_columns))
    for sequence, head, index in np.ndindex(batch, q_heads, queries):
        position = int(past[sequence]) + index
        seen = visible_keys(position, int(totals[sequence]), window, causal)
        output[sequence, head, index], statistics = attend(
            query[sequence, head, index],
            keys[sequence, head // group, seen],
            values[sequence, head // group, seen],
            seen - position,
            *head_values(head, alibi_slopes, head_params),
            normalizer=normalizer,
            scale=scale,
            softcap=softcap,
        )
        if collect_stats:
            stats[sequence, head, index] = astuple(statistics)[:stats_columns]
    return ContiguousOutput(output, keys, values, stats)
