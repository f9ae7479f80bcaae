"""Calls of the benchmarks as structures of `libsharp_cuda.so`; their tensors must live as long as these are used."""

from typing import Any

import torch

import bench.gpu.source_tree  # noqa: F401 - makes sharp.plugins importable
from bench.gpu.inputs import Call
from sharp.plugins.cuda.library import TYPES, AttentionProblem, Attributes, Problem, normalizer_number
from sharp.plugins.ops.attributes import (
    DEFAULT_ALPHA,
    DEFAULT_ENTROPY_THRESHOLD,
    DEFAULT_STATS_COLUMNS,
    ICML2025_COEFFICIENTS,
)


def paged_attention_problem(call: Call, output: torch.Tensor, stats: torch.Tensor) -> Problem:
    """A call of PagedAttention."""
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
    """A call of Attention."""
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
    tensors, options = call.tensors, call.attributes
    coefficients = options.get("temperature_coefficients", ICML2025_COEFFICIENTS)
    attributes = Attributes(
        normalizer=normalizer_number(call.normalizer),
        scale=options["scale"],
        alpha=options.get("alpha", DEFAULT_ALPHA),
        temperature_coefficients=tuple(coefficients),
        temperature_terms=len(coefficients),
        entropy_threshold=options.get("entropy_threshold", DEFAULT_ENTROPY_THRESHOLD),
        softcap=options.get("softcap", 0.0),
        window=options.get("window", -1),
        causal=int(options.get("causal", True)),
        stats_columns=options.get("stats_columns", DEFAULT_STATS_COLUMNS),
    )
    return {
        "attributes": attributes,
        "type": _type(tensors["query"]),
        "head_params_width": tensors["head_params"].shape[1] if "head_params" in tensors else 0,
        "alibi": "alibi_slopes" in tensors,
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    }


def _type(tensor: torch.Tensor) -> int:
    return TYPES.index("fp8" if tensor.dtype == torch.float8_e4m3fn else str(tensor.dtype).removeprefix("torch."))
