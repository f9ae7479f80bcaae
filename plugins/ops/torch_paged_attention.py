"""`torch.ops.sharp.paged_attention`: the op in torch, and how `torch.onnx.export` writes both ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript.values import Opset
from torch import Tensor

import sharp.plugins.ops.torch_attention  # noqa: F401 - registers torch.ops.sharp.attention
from sharp.plugins.errors import InputError
from sharp.plugins.ops.schema import (
    ATTENTION,
    DEFAULT_ALPHA,
    DEFAULT_ENTROPY_THRESHOLD,
    DEFAULT_STATS_COLUMNS,
    DOMAIN,
    ICML2025_COEFFICIENTS,
    PAGED_ATTENTION,
    VERSION,
    register_schema,
)
from sharp.plugins.ops.torch_attend import Attributes, attend
from sharp.plugins.ops.torch_normalizers import split_head_params


@torch.library.custom_op("sharp::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
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
        output [tokens, q_heads, value_dim], key_cache_out and value_cache_out (new tensors: the op is functional),
        stats float32 [tokens, q_heads, stats_columns] (zeros unless `collect_stats` is true).

    Raises:
        InputError: the normalizer is unknown or lacks its parameters, alpha is not above 1, or the caches need scales.
    """
    attributes = Attributes(
        normalizer, scale, alpha, temperature_coefficients, entropy_threshold, softcap, window, causal, stats_columns
    )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype in (torch.int8, torch.float8_e4m3fn):
            raise InputError(f"{name} is {cache.dtype}, whose scales the op for PyTorch does not take; give floats")
    split_head_params(normalizer, head_params)  # as a call without queries computes nothing
    block_size = key_cache.shape[3]
    keys, values = key_cache.clone(), value_cache.clone()
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    keys[slots // block_size, :, :, slots % block_size] = key[stored].to(keys.dtype)
    values[slots // block_size, :, slots % block_size] = value[stored].to(values.dtype)
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    stats = torch.zeros(query.shape[0], query.shape[1], stats_columns, device=query.device)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for sequence, context in enumerate(contexts):
        first, end = starts[sequence], starts[sequence + 1]
        total = context + end - first
        if end == first or total == 0:
            continue
        table = block_table[sequence, : -(-total // block_size)].long()
        used = table.clamp(min=0)
        k = keys[used].permute(1, 0, 3, 2).flatten(1, 2)[:, :total]  # [kv_heads, total, head_dim]
        v = values[used].transpose(0, 1).flatten(1, 2)[:, :total]  # [kv_heads, total, value_dim]
        mapped = (table >= 0).repeat_interleave(block_size)[:total]
        v = torch.where(mapped[:, None], v, 0.0)  # what a hole points at may hold NaN
        position = torch.arange(context, total, device=query.device)[:, None]
        distance = torch.arange(total, device=query.device) - position
        q = query[first:end].transpose(0, 1)  # [q_heads, queries, head_dim]
        result, row_stats = attend(q, k, v, distance, mapped, head_params, alibi_slopes, attributes)
        output[first:end] = result.transpose(0, 1).to(output.dtype)
        if collect_stats is not None and bool(collect_stats):
            stats[first:end] = row_stats.transpose(0, 1)
    return output, keys, values, stats


@paged_attention.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *rest: Any, **attributes: Any) -> tuple[Tensor, ...]:
    key_cache, value_cache = rest[:2]
    output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    columns = attributes.get("stats_columns", DEFAULT_STATS_COLUMNS)
    stats = query.new_empty(query.shape[0], query.shape[1], columns, dtype=torch.float32)
    return output, torch.empty_like(key_cache), torch.empty_like(value_cache), stats


def onnx_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """`custom_translation_table` of `torch.onnx.export(dynamo=True)`: each call becomes one `ai.sharp` node.

    Attach the function body with `function_body.attach_function` after the export, never before `optimize`.
    """
    register_schema()
    # torch writes the node's domain import from this table's opset; the schema must be registered first.
    opset = Opset(DOMAIN, VERSION)

    def translation(name: str) -> Callable[..., Any]:
        def translate(
            *inputs: Any,
            normalizer: str,
            scale: float,
            alpha: float = DEFAULT_ALPHA,
            temperature_coefficients: Sequence[float] | None = None,
            entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD,
            softcap: float = 0.0,
            window: int = -1,
            causal: bool = True,
            key_bound: float = 0.0,
            stats_columns: int = DEFAULT_STATS_COLUMNS,
        ) -> Any:
            return getattr(opset, name)(
                *inputs,
                normalizer=normalizer,
                scale=scale,
                alpha=alpha,
                temperature_coefficients=tuple(temperature_coefficients or ICML2025_COEFFICIENTS),
                entropy_threshold=entropy_threshold,
                softcap=softcap,
                window=window,
                causal=int(causal),
                key_bound=key_bound,
                stats_columns=stats_columns,
                plugin_namespace="",
                plugin_version="1",
            )

        return translate

    return {
        torch.ops.sharp.paged_attention.default: translation(PAGED_ATTENTION.name),
        torch.ops.sharp.attention.default: translation(ATTENTION.name),
    }
