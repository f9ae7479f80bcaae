"""`PagedAttention` in float64 numpy: the single source of truth that every kernel is tested against."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.ops.normalizers import Normalizer, normalize

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


def visible_keys(position: int, total: int, table: Ints, block_size: int, window: int, causal: bool) -> Ints:
    """Positions of the keys that the query at `position` sees, of a sequence of `total` tokens; holes are left out."""
    keys = np.arange(total)
    if causal or window >= 0:
        keys = keys[keys <= position]
    if window >= 0:
        keys = keys[keys > position - window]
    return keys[table[keys // block_size] >= 0]


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
            keys = visible_keys(position, int(context) + end - first, table, block_size, window, causal)
            blocks, offsets = table[keys // block_size], keys % block_size
            for head in range(q_heads):
                visible = key_cache[blocks, head // group, :, offsets]  # [n, head_dim]
                logits = scale * (visible @ query[token, head])
                if softcap > 0:
                    logits = softcap * np.tanh(logits / softcap)
                if alibi_slopes is not None:
                    logits = logits + float(alibi_slopes[head]) * (keys - position)
                parameters = () if head_params is None else tuple(map(float, head_params[head]))
                weights, statistics = normalize(logits, normalizer, parameters)
                output[token, head] = weights @ value_cache[blocks, head // group, offsets]
                if collect_stats:
                    stats[token, head] = (
                        statistics.entropy,
                        statistics.support,
                        statistics.inverse_temperature,
                        statistics.logit_spread,
                    )
    return AttentionOutput(output, key_cache, value_cache, stats)
