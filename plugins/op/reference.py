"""`PagedAttention` in float64 numpy: the single source of truth that every kernel is tested against."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.op import e4m3
from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS, check_attributes
from sharp.plugins.op.key_screen import store_screen
from sharp.plugins.op.normalizers import Normalizer, RowStatistics, normalize

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class AttentionOutput:
    """The outputs of `PagedAttention`, and the auxiliary cache tensors if they were given.

    A scaled cache holds its stored numbers: the integers of int8, the bytes of fp8.

    Attributes:
        output: [tokens, q_heads, value_dim].
        key_cache: [blocks, kv_heads, head_dim, block_size], with the new keys.
        value_cache: [blocks, kv_heads, block_size, value_dim], with the new values.
        stats: [tokens, q_heads, stats_columns]; zeros if no statistics are collected.
        key_scale: [blocks, kv_heads].
        value_scale: [blocks, kv_heads].
        key_screen: [blocks, kv_heads, screen_bytes].
    """

    output: Floats
    key_cache: Floats
    value_cache: Floats
    stats: Floats
    key_scale: Floats | None = None
    value_scale: Floats | None = None
    key_screen: NDArray[np.int8] | None = None


def store(key: Floats, value: Floats, key_cache: Floats, value_cache: Floats, slot_mapping: Ints) -> None:
    """Write each token's key and value into its slot of the caches, in place; a slot below 0 is not stored.

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


def store_int8(numbers: Floats, cache: NDArray[Any], scale: Floats, slot_mapping: Ints, offset_axis: int) -> None:
    """Store keys or values in an int8 cache, in place, in float32 arithmetic: number = scale * integer.

    A token at offset 0 starts a block anew. A later token with larger numbers raises the scale, and the numbers that
    the block and head already hold are rounded again to the new scale. A NaN makes the scale NaN until the block starts
    anew.

    Args:
        numbers: [tokens, kv_heads, dim].
        cache: [blocks, kv_heads, ...] int8, with the offset in the block along `offset_axis`; changed in place.
        scale: [blocks, kv_heads] float32; changed in place.
        slot_mapping: [tokens] block * block_size + offset; -1 is not stored.
        offset_axis: 2 or 3; the other of these two axes is dim.
    """
    for token, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), cache.shape[offset_axis])
        for head, vector in enumerate(numbers[token].astype(np.float32)):
            needed = np.abs(vector).max() / np.float32(127)
            if offset == 0:
                scale[block, head] = needed
            elif not needed <= scale[block, head] and not np.isnan(scale[block, head]):
                ratio = scale[block, head] / needed
                cache[block, head] = np.nan_to_num(np.rint(cache[block, head] * ratio))
                scale[block, head] = needed
            inverse = np.float32(1) / scale[block, head] if scale[block, head] > 0 else np.float32(0)
            held = cache[block, head]
            rounded = np.nan_to_num(np.clip(np.rint(vector * inverse), -127, 127))
            held[(slice(None),) * (offset_axis - 2) + (offset,)] = rounded


def store_fp8(numbers: Floats, cache: NDArray[Any], scale: Floats, slot_mapping: Ints, offset_axis: int) -> None:
    """Store keys or values in an fp8 cache of e4m3 bytes (uint8), in place: number = scale * decode(byte).

    The arguments are those of `store_int8`. A token at offset 0 starts a block anew, and a later token with larger
    numbers raises the block's scale.

    The scale is a power of two, so raising it only moves the exponents of the numbers that the block holds. A number is
    rounded a second time only if its exponent falls below the least. A number that is not finite makes the scale NaN
    until the block starts anew.
    """
    for token, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), cache.shape[offset_axis])
        for head, vector in enumerate(numbers[token].astype(np.float32)):
            needed = e4m3.scale_of(np.abs(vector).max())
            if offset == 0:
                scale[block, head] = needed
            elif not needed <= scale[block, head] and not np.isnan(scale[block, head]):
                ratio = scale[block, head] / needed
                cache[block, head] = e4m3.encode(e4m3.decode(cache[block, head]) * ratio)
                scale[block, head] = needed
            inverse = np.float32(1) / scale[block, head] if scale[block, head] > 0 else np.float32(0)
            held = cache[block, head]
            held[(slice(None),) * (offset_axis - 2) + (offset,)] = e4m3.encode(vector * inverse)


def visible_keys(position: int, total: int, window: int, causal: bool) -> Ints:
    """Return the positions of the keys that the query at `position` sees, in order, among the first `total` keys.

    With `causal` or a window, a query sees no key behind its own position; with a window w >= 0 only the last w keys up
    to there. A negative `window` is none.
    """
    keys = np.arange(total)
    if causal or window >= 0:
        keys = keys[keys <= position]
    if window >= 0:
        keys = keys[keys > position - window]
    return keys


def row_weights(
    query: Floats,
    keys: Floats,
    distance: Ints,
    slope: float,
    parameters: Sequence[float],
    *,
    normalizer: Normalizer,
    scale: float,
    softcap: float,
) -> tuple[NDArray[np.float64], RowStatistics]:
    """Return the weights [n] that one query of one head gives the keys that it sees, and the statistics.

    n may be 0; the statistics are then 0.

    Args:
        query: [head_dim].
        keys: [n, head_dim].
        distance: [n] position of the key less that of the query.
        slope: the head's ALiBi slope, 0 for none; the bias is -slope * |distance|.
        parameters: the head's own parameters (ssa: b, n), followed by its sink if it has one.
        normalizer: the name and its parameters.
        scale: factor of query . key.
        softcap: c in c tanh(z / c), 0 = off.

    Raises:
        InputError: there are too few or too many parameters.
    """
    logits = scale * (keys @ query)
    if softcap > 0:
        logits = softcap * np.tanh(logits / softcap)
    return normalize(logits - slope * np.abs(distance), normalizer, parameters)


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
    """Compute one query of one head over the keys that it sees. Both ops do this for every row.

    `query` is [head_dim], `keys` [n, head_dim], `values` [n, value_dim], and `distance` [n] the position of the key
    less that of the query. The other arguments are those of `row_weights`.

    Returns:
        output [value_dim], which is 0 for n = 0, and the statistics.

    Raises:
        InputError: there are too few or too many parameters.
    """
    weights, statistics = row_weights(
        query, keys, distance, slope, parameters, normalizer=normalizer, scale=scale, softcap=softcap
    )
    weighted = weights != 0  # a key without a weight contributes nothing, even if its value is NaN
    return weights[weighted] @ values[weighted], statistics


def head_values(head: int, alibi_slopes: Floats | None, head_params: Floats | None) -> tuple[float, Sequence[float]]:
    """Return slope and parameters of one head, from alibi_slopes [q_heads] and head_params [q_heads, P].

    Without slopes the slope is 0, without head_params there are no parameters (an empty tuple).
    """
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
    key_scale: Floats | None = None,
    value_scale: Floats | None = None,
    key_screen: NDArray[np.int8] | None = None,
    key_shift: Floats | None = None,
    *,
    normalizer: Normalizer,
    scale: float,
    softcap: float = 0.0,
    window: int = -1,
    causal: bool = True,
    stats_columns: int = DEFAULT_STATS_COLUMNS,
) -> AttentionOutput:
    """Store the new keys and values, then let every query attend through its sequence's block table.

    The inputs are not modified, and the results are float64, rounded only by the caches' dtype. A query sees only what
    the block table maps, so a token that is not stored (slot -1) is seen as what its slot already held. An int8 cache
    needs `key_scale` and `value_scale`, float32, and so does an fp8 cache, which is uint8.

    Args:
        query: [tokens, q_heads, head_dim], tokens of all sequences packed, positions applied.
        key: [tokens, kv_heads, head_dim]; kv_heads divides q_heads.
        value: [tokens, kv_heads, value_dim].
        key_cache: [blocks, kv_heads, head_dim, block_size].
        value_cache: [blocks, kv_heads, block_size, value_dim].
        slot_mapping: [tokens] block * block_size + offset, -1 = do not store.
        block_table: [sequences, max_blocks], -1 = unused.
        query_start: [sequences + 1], cumulative number of tokens.
        context_lens: [sequences], tokens in the cache before this step.
        head_params: [q_heads, P], the normalizer's own columns, then the sink's column if there are sinks.
        alibi_slopes: [q_heads].
        collect_stats: whether to return statistics; otherwise `stats` is zeros.
        key_scale: [blocks, kv_heads].
        value_scale: [blocks, kv_heads].
        key_screen: [blocks, kv_heads, screen_bytes]; the result has it brought up to date. It changes nothing else.
        key_shift: [kv_heads, head_dim], the shift of the screen; None: zeros.
        normalizer: the normalizer with its parameters.
        scale: the factor of query . key.
        softcap: c in c tanh(z / c), 0 = off.
        window: a query sees the last `window` keys up to its own position; -1 = off.
        causal: whether a query sees only keys up to its own position.
        stats_columns: 4, or 5 with the sink's mass.

    Raises:
        InputError: an attribute is outside its limits, or the normalizer does not take these `head_params`.
        ValueError: an int8 or fp8 cache has no scales.
    """
    check_attributes({"scale": scale, "softcap": softcap, "window": window, "stats_columns": stats_columns})
    q_heads, group, block_size = query.shape[1], query.shape[1] // key.shape[1], key_cache.shape[3]
    query = query.astype(np.float64)
    output, stats = np.zeros((*query.shape[:2], value.shape[2])), np.zeros((*query.shape[:2], stats_columns))
    result = AttentionOutput(
        output, key_cache.copy(), value_cache.copy(), stats, _copy(key_scale), _copy(value_scale), _copy(key_screen)
    )
    keys, values = _store_all(result, key, value, slot_mapping, key_shift)
    visible = _visible_slots(query_start, context_lens, block_table, block_size, window, causal)
    for token, distances, blocks, offsets in visible:
        for head in range(q_heads):
            output[token, head], statistics = attend(
                query[token, head],
                keys[blocks, head // group, :, offsets],
                values[blocks, head // group, offsets],
                distances,
                *head_values(head, alibi_slopes, head_params),
                normalizer=normalizer,
                scale=scale,
                softcap=softcap,
            )
            if collect_stats:
                stats[token, head] = astuple(statistics)[:stats_columns]
    return replace(
        result,
        key_cache=result.key_cache.astype(np.float64),
        value_cache=result.value_cache.astype(np.float64),
    )


def _copy(array: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return a copy of the array; None stays None."""
    return None if array is None else array.copy()


def _store_all(
    caches: AttentionOutput, key: Floats, value: Floats, slot_mapping: Ints, key_shift: Floats | None
) -> tuple[Floats, Floats]:
    """Store the new keys and values in the caches, scales and screen of `caches`, in place.

    Returns:
        The keys and values that the caches then stand for, float64, with the shapes of the caches.

    Raises:
        ValueError: an int8 or fp8 cache has no scales.
    """
    held_keys: NDArray[Any] = caches.key_cache
    held_values: NDArray[Any] = caches.value_cache
    is_fp8 = held_keys.dtype == np.uint8
    if caches.key_scale is not None and caches.value_scale is not None:
        store_scaled = store_fp8 if is_fp8 else store_int8
        store_scaled(key, held_keys, caches.key_scale, slot_mapping, offset_axis=3)
        store_scaled(value, held_values, caches.value_scale, slot_mapping, offset_axis=2)
        keys, values = (e4m3.decode(array) if is_fp8 else array for array in (held_keys, held_values))
        key_scale, value_scale = (scale.astype(np.float64) for scale in (caches.key_scale, caches.value_scale))
        return keys * key_scale[:, :, None, None], values * value_scale[:, :, None, None]
    if is_fp8 or held_keys.dtype == np.int8:
        raise ValueError(f"a cache of {held_keys.dtype} needs key_scale and value_scale")
    store(key, value, held_keys, held_values, slot_mapping)
    if caches.key_screen is not None:
        store_screen(held_keys, caches.key_screen, key_shift, slot_mapping)
    return held_keys.astype(np.float64), held_values.astype(np.float64)


def _visible_slots(
    query_start: Ints, context_lens: Ints, block_table: Ints, block_size: int, window: int, causal: bool
) -> Iterator[tuple[int, Ints, Ints, Ints]]:
    """Yield every token with the keys that it sees: their distances, and the blocks and offsets of their slots.

    Blocks that the table does not map are skipped. A token sees the keys of its sequence up to its own position if
    `causal`, and of these the last `window` (-1: all).
    """
    for sequence, context in enumerate(context_lens):
        first, end = int(query_start[sequence]), int(query_start[sequence + 1])
        table = block_table[sequence]
        for token in range(first, end):
            position = int(context) + token - first
            keys = visible_keys(position, int(context) + end - first, window, causal)
            keys = keys[table[keys // block_size] >= 0]
            yield token, keys - position, table[keys // block_size], keys % block_size
