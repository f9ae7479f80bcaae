"""`PagedAttention` in float64 numpy: the single source of truth that every kernel is tested against."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.ops.normalizers import Normalizer, RowStatistics, normalize

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class AttentionOutput:
    """The op's four outputs, in the shapes of `schema.OUTPUTS`."""

    output: Floats
    key_cache: Floats
    value_cache: Floats
    stats: Floats


def store(key: Floats, value: Floats, key_cache: Floats, value_cache: Floats, slot_mapping: Ints) -> None:
    """Write each token's key and value into its slot of the caches, in place; slot -1 is not stored.

    Args:
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, value_dim].
        key_cache: [blocks, kv_heads, head_dim, block_size].
        value_cache: [blocks, kv_heads, block_size, value_dim].
        slot_mapping: [tokens] block * block_size + offset.
    """
    block_size = key_cache.shape[3]
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            block, offset = divmod(int(slot), block_size)
            key_cache[block, :, :, offset] = key[token]
            value_cache[block, :, offset, :] = value[token]


def visible_keys(position: int, total: int, window: int, causal: bool) -> Ints:
    """Positions of the keys that the query at `position` sees, of the first `total`."""
    keys = np.arange(total)
    if causal or window >= 0:
        keys = keys[keys <= position]
    if window >= 0:
        keys = keys[keys > position - window]
    return keys


def attend(
    query: Floats,
    keys: Floats,
    values: Floats,
    distance: Ints,
    slope: float,
    parameters: Sequence[float],
    *,
    normalizer: Normalizer,
    scale: float,
    softcap: float,
) -> tuple[Floats, RowStatistics]:
    """One query of one head over the keys that it sees: what both ops do.

    Args:
        query: [head_dim].
        keys: [n, head_dim].
        values: [n, value_dim].
        distance: [n] position of the key less that of the query.
        slope: the head's ALiBi slope, 0 for none; the bias is -slope * |distance|.
        parameters: the head's own parameters (ssa: b, n).
        normalizer: the name and its parameters.
        scale: factor of query . key.
        softcap: c of c tanh(z / c), 0 = off.

    Returns:
        output [value_dim] and the statistics.
    """
    logits = scale * (keys @ query)
    if softcap > 0:
        logits = softcap * np.tanh(logits / softcap)
    logits = logits - slope * np.abs(distance)
    weights, statistics = normalize(logits, normalizer, parameters)
    return weights @ values, statistics


def head_values(head: int, alibi_slopes: Floats | None, head_params: Floats | None) -> tuple[float, Sequence[float]]:
    """Slope and parameters of one head, of the inputs alibi_slopes [q_heads] and head_params [q_heads, P]."""
    slope = 0.0 if alibi_slopes is None else float(alibi_slopes[head])
    return slope, () if head_params is None else tuple(map(float, head_params[head]))


def paged_attention(
    query: Floats,
    key: Floats,
    value: Floats,
    key_cache: Floats,
    value_cache: Floats,
    slot_mapping: Ints,
    block_table: Ints,
    query_start: Ints,
    context_lens: Ints,
    head_params: Floats | None = None,
    alibi_slopes: Floats | None = None,
    collect_stats: bool = False,
    *,
    normalizer: Normalizer,
    scale: float,
    softcap: float = 0.0,
    window: int = -1,
    causal: bool = True,
) -> AttentionOutput:
    """The whole op: store the new keys and values, then let every query attend through its block table.

    Shapes are those of `schema`; the inputs stay as they are and the results are float64. A query sees only what the
    block table maps, so a token that is not stored (slot -1) is seen as what its slot already held.
    """
    tokens, q_heads, _ = query.shape
    group = q_heads // key.shape[1]
    block_size = key_cache.shape[3]
    query = query.astype(np.float64)
    key_cache, value_cache = key_cache.astype(np.float64), value_cache.astype(np.float64)
    store(key, value, key_cache, value_cache, slot_mapping)
    output = np.zeros((tokens, q_heads, value.shape[2]))
    stats = np.zeros((tokens, q_heads, 4))
    for sequence, context in enumerate(context_lens):
        first, end = int(query_start[sequence]), int(query_start[sequence + 1])
        table = block_table[sequence]
        for token in range(first, end):
            position = int(context) + token - first
            keys = visible_keys(position, int(context) + end - first, window, causal)
            keys = keys[table[keys // block_size] >= 0]  # holes are left out
            blocks, offsets = table[keys // block_size], keys % block_size
            for head in range(q_heads):
                output[token, head], statistics = attend(
                    query[token, head],
                    key_cache[blocks, head // group, :, offsets],
                    value_cache[blocks, head // group, offsets],
                    keys - position,
                    *head_values(head, alibi_slopes, head_params),
                    normalizer=normalizer,
                    scale=scale,
                    softcap=softcap,
                )
                if collect_stats:
                    stats[token, head] = astuple(statistics)
    return AttentionOutput(output, key_cache, value_cache, stats)
