"""`PagedAttention` in float64 numpy: the single source of truth that every kernel is tested against."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.ops import e4m3
from sharp.plugins.ops.attributes import DEFAULT_STATS_COLUMNS
from sharp.plugins.ops.key_screen import store_screen
from sharp.plugins.ops.normalizers import Normalizer, RowStatistics, normalize

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class AttentionOutput:
    """The op's outputs, in the shapes of `schema.OUTPUTS`; the scales of int8 and fp8 caches, the screen if given.

    Caches hold what they hold: the integers of int8, the bytes of fp8.
    """

    output: Floats
    key_cache: Floats
    value_cache: Floats
    stats: Floats
    key_scale: Floats | None = None
    value_scale: Floats | None = None
    key_screen: NDArray[np.int8] | None = None


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


def store_int8(numbers: Floats, cache: NDArray[Any], scale: Floats, slot_mapping: Ints, offset_axis: int) -> None:
    """`store` for one of two int8 caches, in place, in float32 arithmetic: number = scale * integer.

    Offset 0 starts a block anew; a token with larger numbers raises the scale, and what the block and head hold is
    rounded to it once more. A NaN makes the scale NaN until the block starts anew.

    Args:
        numbers: [tokens, kv_heads, dim].
        cache: [blocks, kv_heads, ...], with the offset in the block along `offset_axis`.
        scale: [blocks, kv_heads] float32.
        slot_mapping: [tokens] block * block_size + offset.
        offset_axis: 2 or 3; the other one is dim.
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
    """`store_int8` for a cache of e4m3 numbers: number = scale * decode(byte).

    The scale is a power of two, so a larger one only moves the exponents of what the block holds: a number is rounded
    a second time where its exponent falls below the least. A number that is not finite makes the scale NaN until the
    block starts anew.
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
    """Positions of the keys that the query at `position` sees, of the first `total`."""
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
    """The weights [n] that one query of one head gives the keys that it sees, and their statistics.

    Args:
        query: [head_dim].
        keys: [n, head_dim].
        distance: [n] position of the key less that of the query.
        slope: the head's ALiBi slope, 0 for none; the bias is -slope * |distance|.
        parameters: the head's own parameters (ssa: b, n).
        normalizer: the name and its parameters.
        scale: factor of query . key.
        softcap: c of c tanh(z / c), 0 = off.
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
    """One query of one head over the keys that it sees: what both ops do; values [n, value_dim], else `row_weights`.

    Returns:
        output [value_dim] and the statistics.
    """
    weights, statistics = row_weights(
        query, keys, distance, slope, parameters, normalizer=normalizer, scale=scale, softcap=softcap
    )
    weighted = weights != 0  # a key without a weight contributes nothing, even if its value is NaN
    return weights[weighted] @ values[weighted], statistics


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
    """The whole op: store the new keys and values, then let every query attend through its block table.

    Shapes are those of `schema`; the inputs stay as they are and the results are float64, after what the caches' dtype
    rounds away. A query sees only what the block table maps, so a token that is not stored (slot -1) is seen as what
    its slot already held. An int8 cache, and an fp8 one, which is uint8, need `key_scale` and `value_scale`, float32.
    `key_screen` is brought up to date and otherwise changes nothing.
    """
    tokens, q_heads, _ = query.shape
    group = q_heads // key.shape[1]
    block_size = key_cache.shape[3]
    query = query.astype(np.float64)
    stored_keys: NDArray[Any] = key_cache.copy()
    stored_values: NDArray[Any] = value_cache.copy()
    if key_scale is not None and value_scale is not None:
        key_scale, value_scale = key_scale.copy(), value_scale.copy()
        is_fp8 = stored_keys.dtype == np.uint8
        store_scaled = store_fp8 if is_fp8 else store_int8
        store_scaled(key, stored_keys, key_scale, slot_mapping, offset_axis=3)
        store_scaled(value, stored_values, value_scale, slot_mapping, offset_axis=2)
        held = [e4m3.decode(array) if is_fp8 else array for array in (stored_keys, stored_values)]
        key_cache = held[0] * key_scale.astype(np.float64)[:, :, None, None]
        value_cache = held[1] * value_scale.astype(np.float64)[:, :, None, None]
    else:
        if stored_keys.dtype in (np.int8, np.uint8):
            raise ValueError(f"a cache of {stored_keys.dtype} needs key_scale and value_scale")
        store(key, value, stored_keys, stored_values, slot_mapping)
        if key_screen is not None:
            key_screen = key_screen.copy()
            store_screen(stored_keys, key_screen, key_shift, slot_mapping)
        key_cache, value_cache = stored_keys.astype(np.float64), stored_values.astype(np.float64)
    output = np.zeros((tokens, q_heads, value.shape[2]))
    stats = np.zeros((tokens, q_heads, stats_columns))
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
                    stats[token, head] = astuple(statistics)[:stats_columns]
    stored = [array.astype(np.float64) for array in (stored_keys, stored_values)]
    return AttentionOutput(output, stored[0], stored[1], stats, key_scale, value_scale, key_screen)
