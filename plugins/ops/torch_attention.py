"""`torch.ops.sharp.attention`: the interchange op in torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sharp.plugins.errors import InputError
from sharp.plugins.ops.schema import DEFAULT_ALPHA, DEFAULT_ENTROPY_THRESHOLD, DEFAULT_STATS_COLUMNS
from sharp.plugins.ops.torch_attend import Attributes, attend
from sharp.plugins.ops.torch_normalizers import split_head_params


@torch.library.custom_op("sharp::attention", mutates_args=())
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
    temperature_coefficients: Sequence[float] | None = None,
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD,
    softcap: float = 0.0,
    window: int = -1,
    causal: bool = True,
    key_bound: float = 0.0,  # noqa: ARG001 - for kernels that leave out keys
    stats_columns: int = DEFAULT_STATS_COLUMNS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op in plain torch, for export, verification and as a fallback; inputs and attributes as in `schema`.

    Returns:
        output [batch, q_heads, queries, value_dim], present_key and present_value (new tensors: the op is functional),
        stats float32 [batch, q_heads, queries, stats_columns] (zeros unless `collect_stats` is true).

    Raises:
        InputError: the normalizer is unknown or lacks its parameters, alpha is not above 1, or past inputs that belong
            together are not given together.
    """
    attributes = Attributes(
        normalizer, scale, alpha, temperature_coefficients, entropy_threshold, softcap, window, causal, stats_columns
    )
    split_head_params(normalizer, head_params)  # as a call without queries computes nothing
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
