"""Calls of the benchmarks as structures of `libsharp_cuda.so`, which are valid as long as the calls' tensors live."""

from typing import Any

import torch

import bench.gpu.source_tree  # noqa: F401 - makes sharp.plugins importable
from bench.gpu.inputs import Call
from sharp.plugins.cuda.library import TYPES, AttentionProblem, AttributesStruct, Problem


def paged_attention_problem(call: Call, output: torch.Tensor, stats: torch.Tensor) -> Problem:
    """Return the structure of a call of PagedAttention.

    `output` and `stats` are the tensors that the call writes.
    """
    tensors = call.tensors
    tokens, q_heads, head_dim = tensors["query"].shape
    blocks, kv_heads, block_size, value_dim = tensors["value_cache"].shape
    sequences, max_blocks = tensors["block_table"].shape
    return Problem(
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        blocks=blocks,
        block_size=block_size,
        sequences=sequences,
        max_blocks=max_blocks,
        cache_type=_type(tensors["key_cache"]),
        screened="key_screen" in tensors,
        output=output.data_ptr(),
        stats=stats.data_ptr(),
        **_common(call),
    )


def attention_problem(
    call: Call, output: torch.Tensor, presents: tuple[torch.Tensor, torch.Tensor], stats: torch.Tensor
) -> AttentionProblem:
    """Return the structure of a call of Attention.

    `output`, `presents` (key, value) and `stats` are the tensors that the call writes.
    """
    tensors = call.tensors
    batch, q_heads, queries, head_dim = tensors["query"].shape
    _, kv_heads, new_keys, value_dim = tensors["value"].shape
    return AttentionProblem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        queries=queries,
        new_keys=new_keys,
        head_dim=head_dim,
        value_dim=value_dim,
        capacity=tensors["past_key"].shape[2] if "past_key" in tensors else 0,
        has_past="past_key" in tensors,
        shared="past_lens" in tensors,
        has_presents=True,
        output=output.data_ptr(),
        present_key=presents[0].data_ptr(),
        present_value=presents[1].data_ptr(),
        stats=stats.data_ptr(),
        **_common(call),
    )


def _common(call: Call) -> dict[str, Any]:
    """Return the fields that the C structs of both ops share, with tensors as addresses."""
    tensors = call.tensors
    return {
        "attributes": AttributesStruct.of({**call.attributes, "normalizer": call.normalizer}),
        "type": _type(tensors["query"]),
        "parameters": tensors["head_params"].shape[1] if "head_params" in tensors else 0,
        "alibi": "alibi_slopes" in tensors,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    }


def _type(tensor: torch.Tensor) -> int:
    """Return the number of the tensor's type in the C enum."""
    return TYPES.index("fp8" if tensor.dtype == torch.float8_e4m3fn else str(tensor.dtype).removeprefix("torch."))
