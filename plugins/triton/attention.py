"""`SharpAttention`, the op over contiguous keys, on a GPU under PyTorch, with the kernels of `variants.py`."""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.plugins.op.attributes import Attributes, AttributeValues
from sharp.plugins.op.definition import ATTENTION
from sharp.plugins.triton.launch_plan import Shapes
from sharp.plugins.triton.launching import arguments_of, check_shapes, device_of, options_of, run_kernels

BLOCK_SIZE = 16  # granularity of the stored logits; the keys themselves have no blocks


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
    **given: Unpack[AttributeValues],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `SharpAttention` on a GPU.

    `query` is [batch, q_heads, queries, head_dim], `key` and `value` [batch, kv_heads, new_keys, dim], the past [batch,
    kv_heads, capacity, dim]. With `past_lens` int32 [batch] the past is a shared buffer, of which these places are
    filled. `total_lens` int32 [batch] is the number of keys that are not padding, past included. `head_params` is
    float32 [q_heads, P], `alibi_slopes` float32 [q_heads], `collect_stats` one bool. Attributes are keywords;
    normalizer and scale are required. The tensors must be contiguous and on one device, those of keys, values and
    queries of one type.

    A shared buffer is updated in place. Nothing waits for the device, so a new key that counts but does not fit the
    buffer is dropped, where the CPU kernels would raise an error.

    Returns:
        output [batch, q_heads, queries, value_dim], present_key and present_value (the shared buffer itself; `key` and
        `value` themselves if there is no past), and stats float32 [batch, q_heads, queries, stats_columns], zeros
        unless `collect_stats` is true.

    Raises:
        InputError: an attribute, dtype or size is not supported, past inputs are not given together, or a tensor is not
            contiguous, or on the CPU without Triton's interpreter.
        SharpError: the native library, which plans the launches, is not built.
    """
    if (past_key is None) != (past_value is None) or (past_lens is not None and past_key is None):
        raise InputError("past_key and past_value must be given together, and past_lens only with them")
    for name, tensor in (("key", key), ("value", value), ("past_key", past_key), ("past_value", past_value)):
        if tensor is not None and tensor.dtype != query.dtype:
            raise InputError(f"{name} is {tensor.dtype} and query {query.dtype}; they must be of one type")
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "past_key": past_key,
        "past_value": past_value,
        "past_lens": past_lens,
        "total_lens": total_lens,
        "head_params": head_params,
        "alibi_slopes": alibi_slopes,
        "collect_stats": collect_stats,
    }
    sizes = check_shapes(ATTENTION, inputs)
    keys, values = _with_past(key, value, past_key, past_value, shared=past_lens is not None)
    attributes = Attributes(**given)
    options = options_of(attributes, query, value, keys, inputs, BLOCK_SIZE, contiguous=True)
    batch, q_heads, queries, _ = query.shape
    output = query.new_empty(batch, q_heads, queries, value.shape[3])
    stats = torch.zeros(batch, q_heads, queries, attributes.stats_columns, dtype=torch.float32, device=query.device)
    scratch = partial(torch.empty, dtype=torch.int32, device=query.device)
    inputs |= {"past_key": None, "past_value": None}  # the kernels take both as key_cache and value_cache
    arguments = arguments_of(ATTENTION, attributes, inputs, output, stats) | {
        "key_cache": keys,
        "value_cache": values,
        "key_scale": stats,
        "value_scale": stats,
        "query_start": scratch(batch + 1),
        "context_lens": scratch(batch),
        "block_table": scratch(batch),
        "slots": keys.shape[2],
        "new_keys": key.shape[2],
        "past": sizes.get("capacity", 0) if past_lens is None else -1,
        "counted": int(total_lens is not None),
        "stored": int(past_key is not None),
    }
    blocks = -(-keys.shape[2] // BLOCK_SIZE)
    multiprocessors = device_of(query.device)[1]
    shapes = Shapes(batch * queries, batch, blocks, q_heads, key.shape[1], multiprocessors, key.shape[2])
    run_kernels(options, shapes, query.device, arguments)
    return output, keys, values, stats


def _with_past(
    key: Tensor, value: Tensor, past_key: Tensor | None, past_value: Tensor | None, *, shared: bool
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that the kernels read: the new ones, a `shared` buffer, or a copy of past and new.

    In a copy, the kernels fill the places of the new keys and values.
    """
    if past_key is None or past_value is None:
        return key, value
    if shared:
        return past_key, past_value
    batch, kv_heads, capacity, _ = past_key.shape
    keys, values = (new.new_empty(batch, kv_heads, capacity + new.shape[2], new.shape[3]) for new in (key, value))
    keys[:, :, :capacity], values[:, :, :capacity] = past_key, past_value
    return keys, values
