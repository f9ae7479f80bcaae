"""`torch.ops.sharp.attention`: the op `SharpAttention` in PyTorch."""

from typing import Any, Unpack

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS, Attributes, AttributeValues
from sharp.plugins.op.definition import ATTENTION
from sharp.plugins.op.torch_attend import attend, torch_schema
from sharp.plugins.op.torch_normalizers import split_head_params


@torch.library.custom_op("sharp::attention", mutates_args=(), schema=torch_schema(ATTENTION))
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
    """Compute `SharpAttention` in plain torch, for export, verification and as a fallback.

    `query` is [batch, q_heads, queries, head_dim], `key` and `value` [batch, kv_heads, new_keys, dim], the past [batch,
    kv_heads, capacity, dim]. With `past_lens` int32 [batch] the past is a buffer, of which these places are filled.
    `total_lens` int32 [batch] is the number of keys that are not padding, past included. `head_params` is [q_heads, P],
    `alibi_slopes` [q_heads], `collect_stats` a bool scalar. Attributes are keywords; normalizer and scale are required.

    Returns:
        output [batch, q_heads, queries, value_dim], present_key and present_value (new tensors: the op is functional),
        stats float32 [batch, q_heads, queries, stats_columns] (zeros unless `collect_stats` is true).

    Raises:
        InputError: an attribute is outside its limits, the normalizer does not take these columns of `head_params`, or
            past inputs that belong together are not given together.
    """
    attributes = Attributes(**given)
    split_head_params(attributes.normalizer, head_params)  # a check, also for a call without queries
    if (past_key is None) != (past_value is None) or (past_lens is not None and past_key is None):
        raise InputError("past_key and past_value must be given together, and past_lens only with them")
    past = torch.full(query.shape[:1], 0 if past_key is None else past_key.shape[2], device=query.device)
    if past_lens is not None:
        past = past_lens.long()
    total = past + key.shape[2]  # [batch]
    if total_lens is not None:
        total = torch.minimum(total, total_lens.long())
    keys = _present(key, past_key, past_lens, total)
    values = _present(value, past_value, past_lens, total)
    key_position = torch.arange(keys.shape[2], device=query.device)
    exists = key_position < total[:, None]  # [batch, keys]
    position = past[:, None] + torch.arange(query.shape[2], device=query.device)
    distance = key_position - position[:, :, None]  # [batch, queries, keys]
    visible_values = torch.where(exists[:, None, :, None], values, 0.0)  # padding may hold NaN
    output, stats = attend(
        query, keys, visible_values, distance, exists[:, None], head_params, alibi_slopes, attributes
    )
    if collect_stats is None or not bool(collect_stats):
        stats = torch.zeros_like(stats)
    return output.to(query.dtype), keys, values, stats


def _present(new: Tensor, past: Tensor | None, past_lens: Tensor | None, total: Tensor) -> Tensor:
    """Return present keys or values [batch, kv_heads, keys, dim]: `new`, behind or within a copy of `past`.

    Without `past_lens` the new tokens follow the past ones. Else `past` is a buffer, and sequence i's new tokens fill
    its positions `past_lens[i]` to `total[i]` (exclusive).
    """
    if past is None:
        return new.clone()
    if past_lens is None:
        return torch.cat([past, new.to(past.dtype)], dim=2)
    buffer = past.clone()
    for sequence, (first, end) in enumerate(zip(past_lens.tolist(), total.tolist(), strict=True)):
        buffer[sequence, :, first:end] = new[sequence, :, : max(end - first, 0)].to(buffer.dtype)
    return buffer


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **attributes: Any) -> tuple[Tensor, ...]:
    """Return empty outputs (output, present_key, present_value, stats) with the op's shapes and dtypes, for tracing."""
    past_key, past_value, past_lens = (*rest, None, None, None)[:3]
    presents = []
    for new, past in ((key, past_key), (value, past_value)):
        if past is None:
            presents.append(torch.empty_like(new))
        elif past_lens is None:
            presents.append(past.new_empty(*past.shape[:2], past.shape[2] + new.shape[2], past.shape[3]))
        else:
            presents.append(torch.empty_like(past))
    output = query.new_empty(*query.shape[:3], value.shape[3])
    columns = attributes.get("stats_columns", DEFAULT_STATS_COLUMNS)
    return output, *presents, query.new_empty(*query.shape[:3], columns, dtype=torch.float32)
