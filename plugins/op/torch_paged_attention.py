"""`torch.ops.sharp.paged_attention`: the op `PagedAttention` in PyTorch, and the translation of both ops to ONNX."""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from onnxscript.values import Opset
from torch import Tensor

import sharp.plugins.op.torch_attention  # noqa: F401 - registers torch.ops.sharp.attention
from sharp.core.errors import InputError
from sharp.plugins.op.attributes import ATTRIBUTE_DEFAULTS, Attributes, AttributeValues
from sharp.plugins.op.schema import (
    ATTENTION,
    DEFAULT_STATS_COLUMNS,
    DOMAIN,
    PAGED_ATTENTION,
    VERSION,
    register_schema,
)
from sharp.plugins.op.torch_attend import attend, torch_schema
from sharp.plugins.op.torch_normalizers import split_head_params


@torch.library.custom_op("sharp::paged_attention", mutates_args=(), schema=torch_schema(PAGED_ATTENTION))
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
    **given: Unpack[AttributeValues],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `PagedAttention` in plain torch, for export, verification and as a fallback.

    `query` is [tokens, q_heads, head_dim], `key` and `value` [tokens, kv_heads, dim], `key_cache` [blocks, kv_heads,
    head_dim, block_size], `value_cache` [blocks, kv_heads, block_size, value_dim]. The rest is int32: `slot_mapping`
    [tokens] (block * block_size + offset, -1 = do not store), `block_table` [sequences, max_blocks] (-1 = unused),
    `query_start` [sequences + 1], `context_lens` [sequences], the tokens in the cache before this step. `head_params`
    is [q_heads, P], `alibi_slopes` [q_heads], `collect_stats` a bool scalar. Attributes are keywords; normalizer and
    scale are required.

    Returns:
        output [tokens, q_heads, value_dim], key_cache_out and value_cache_out (new tensors: the op is functional),
        stats float32 [tokens, q_heads, stats_columns] (zeros unless `collect_stats` is true).

    Raises:
        InputError: an attribute is outside its limits, the normalizer does not take these columns of `head_params`, or
            a cache is int8 or fp8, which need scales.
    """
    attributes = Attributes(**given)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dtype in (torch.int8, torch.float8_e4m3fn):
            raise InputError(f"{name} is {cache.dtype}, whose scales the op for PyTorch does not take; give floats")
    split_head_params(attributes.normalizer, head_params)  # a check, also for a call without queries
    block_size = key_cache.shape[3]
    keys, values = key_cache.clone(), value_cache.clone()
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    keys[slots // block_size, :, :, slots % block_size] = key[stored].to(keys.dtype)
    values[slots // block_size, :, slots % block_size] = value[stored].to(values.dtype)
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    stats = torch.zeros(query.shape[0], query.shape[1], attributes.stats_columns, device=query.device)
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
        v = torch.where(mapped[:, None], v, 0.0)  # the block read for an unmapped entry may hold NaN
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
    """Return empty outputs (output, key_cache, value_cache, stats) with the op's shapes and dtypes, for tracing."""
    key_cache, value_cache = rest[:2]
    output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    columns = attributes.get("stats_columns", DEFAULT_STATS_COLUMNS)
    stats = query.new_empty(query.shape[0], query.shape[1], columns, dtype=torch.float32)
    return output, torch.empty_like(key_cache), torch.empty_like(value_cache), stats


def onnx_translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return `custom_translation_table` for `torch.onnx.export(dynamo=True)`: each call becomes one `ai.sharp` node.

    The keys are the torch ops, the values functions that write a node. The ops are registered with onnx, too. Attach
    the function body with `function_body.attach_function` after the export, never before `optimize`.
    """
    register_schema()
    # torch writes the import of the node's domain from this opset, and Opset needs the schema to be registered already.
    opset = Opset(DOMAIN, VERSION)

    def translation(name: str) -> Callable[..., Any]:
        """Return the function that writes the op `name` as an ONNX node for torch's exporter."""

        def translate(*inputs: Any, **values: Any) -> Any:
            """Append the op's node with these inputs and attributes, and with defaults for the other attributes."""
            given = {key: value for key, value in values.items() if value is not None}
            if "causal" in given:
                given["causal"] = int(given["causal"])
            return getattr(opset, name)(*inputs, **ATTRIBUTE_DEFAULTS | given)

        return translate

    return {
        torch.ops.sharp.paged_attention.default: translation(PAGED_ATTENTION.name),
        torch.ops.sharp.attention.default: translation(ATTENTION.name),
    }
