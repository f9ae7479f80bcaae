"""`SharpAttention`, the op over contiguous keys, on a GPU under PyTorch, by the kernels of `variants.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import (
    DEFAULT_ALPHA,
    DEFAULT_ENTROPY_THRESHOLD,
    DEFAULT_STATS_COLUMNS,
    ICML2025_COEFFICIENTS,
)
from sharp.plugins.triton.launch_sizes import Shapes
from sharp.plugins.triton.launching import Attributes, check_shapes, device_of, run_kernels

BLOCK_SIZE = 16  # in which logits are stored; keys have no blocks


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_lens: Tensor | None = None,
    total_lens: Tensor | None = None,
    head_params: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    collect_stats: Tensor | None = None,
    *,
    normalizer: str,
    scale: float,
    alpha: float = DEFAULT_ALPHA,
    temperature_coefficients: Sequence[float] = ICML2025_COEFFICIENTS,
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD,
    softcap: float = 0.0,
    window: int = -1,
    causal: bool = True,
    stats_columns: int = DEFAULT_STATS_COLUMNS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole op; inputs and attributes as in `sharp.plugins.ops.schema.ATTENTION`.

    A shared buffer is updated in place. Nothing waits for the device: a new key that counts and does not fit the
    buffer is left out, which the kernels of the CPU would refuse. The tensors must be contiguous, on one device and of
    one type.

    Returns:
        output [batch, q_heads, queries, value_dim], present_key and present_value (a shared buffer itself, and without
        a past `key` and `value` themselves), and stats float32 [batch, q_heads, queries, stats_columns].

    Raises:
        InputError: an attribute, dtype or size that the kernels lack, or past inputs that are not given together.
    """
    batch, q_heads, queries, head_dim = query.shape
    _, kv_heads, new_keys, value_dim = value.shape
    if q_heads % kv_heads:
        raise InputError(f"query has {q_heads} heads and key {kv_heads}; the first must be a multiple of the second")
    if (past_key is None) != (past_value is None) or (past_lens is not None and past_key is None):
        raise InputError("past_key and past_value must be given together, and past_lens only with them")
    for name, tensor in (("key", key), ("value", value), ("past_key", past_key), ("past_value", past_value)):
        if tensor is not None and tensor.dtype != query.dtype:
            raise InputError(f"{name} is {tensor.dtype} and query {query.dtype}; they must be of one type")
    capacity = 0 if past_key is None else past_key.shape[2]
    check_shapes(
        key=(key, (batch, kv_heads, new_keys, head_dim)),
        value=(value, (batch, kv_heads, new_keys, value_dim)),
        past_key=(past_key, (batch, kv_heads, capacity, head_dim)),
        past_value=(past_value, (batch, kv_heads, capacity, value_dim)),
        past_lens=(past_lens, (batch,)),
        total_lens=(total_lens, (batch,)),
        head_params=(head_params, (q_heads, *(() if head_params is None else head_params.shape[1:]))),
        alibi_slopes=(alibi_slopes, (q_heads,)),
    )
    keys, values = key, value
    if past_key is not None and past_value is not None:
        keys, values = past_key, past_value
        if past_lens is None:
            keys = key.new_empty(batch, kv_heads, capacity + new_keys, head_dim)
            values = value.new_empty(batch, kv_heads, capacity + new_keys, value_dim)
            keys[:, :, :capacity], values[:, :, :capacity] = past_key, past_value
    attributes = Attributes(
        normalizer, scale, alpha, temperature_coefficients, entropy_threshold, softcap, window, causal, stats_columns
    )
    options = attributes.options(
        query,
        value,
        keys,
        block_size=BLOCK_SIZE,
        contiguous=True,
        head_params=head_params,
        alibi_slopes=alibi_slopes,
        collect_stats=collect_stats,
    )
    slots = keys.shape[2]
    blocks = -(-slots // BLOCK_SIZE)
    shapes = Shapes(batch * queries, batch, blocks, q_heads, kv_heads, device_of(query.device)[1], new_keys)
    output = query.new_empty(batch, q_heads, queries, value_dim)
    stats = torch.zeros(batch, q_heads, queries, stats_columns, dtype=torch.float32, device=query.device)
    unread = torch.empty(1, dtype=torch.int32, device=query.device)
    run_kernels(
        options,
        shapes,
        query.device,
        attributes.arguments()
        | {
            "query": query,
            "key": key,
            "value": value,
            "key_cache": keys,
            "value_cache": values,
            "key_scale": stats,  # what is absent is never read; a null pointer would make another variant
            "value_scale": stats,
            "past_lens": unread if past_lens is None else past_lens,
            "total_lens": unread if total_lens is None else total_lens,
            "query_start": unread.new_empty(batch + 1),
            "context_lens": unread.new_empty(batch),
            "block_table": unread.new_empty(batch),
            "head_params": stats if head_params is None else head_params,
            "alibi_slopes": stats if alibi_slopes is None else alibi_slopes,
            "collect_stats": query.new_empty(0, dtype=torch.bool) if collect_stats is None else collect_stats,
            "output": output,
            "stats": stats,
            "parameters": 0 if head_params is None else head_params.shape[-1],
            "slots": slots,
            "new_keys": new_keys,
            "past": capacity if past_lens is None else -1,
            "counted": int(total_lens is not None),
            "stored": int(past_key is not None),
        },
    )
    return output, keys, values, stats
