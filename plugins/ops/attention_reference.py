"""`Attention`, the interchange op, in float64 numpy; a row is computed as in `PagedAttention`'s reference."""

from dataclasses import astuple, dataclass

import numpy as np

from sharp.plugins.ops.attributes import DEFAULT_STATS_COLUMNS
from sharp.plugins.ops.normalizers import Normalizer
from sharp.plugins.ops.reference import Floats, Ints, attend, head_values, visible_keys


@dataclass(frozen=True)
class ContiguousOutput:
    """The op's four outputs, in the shapes of `schema.ATTENTION`."""

    output: Floats
    present_key: Floats
    present_value: Floats
    stats: Floats


def present(new: Floats, past: Floats | None, past_lens: Ints | None, totals: Ints) -> Floats:
    """Past and new keys (or values) [batch, kv_heads, ..., dim] as one, in float64; see `schema.ATTENTION`.

    `totals` [batch] is how many keys of a sequence count. The inputs stay as they are.
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
    """The whole op; shapes are those of `schema.ATTENTION`, the results are float64."""
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
