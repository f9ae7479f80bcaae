"""`PagedAttention` on a GPU under PyTorch, by the kernels of `variants.py`."""

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
from sharp.plugins.ops.key_screen import screen_bytes
from sharp.plugins.triton.launch_sizes import Shapes
from sharp.plugins.triton.launching import Attributes, check_shapes, device_of, run_kernels


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_screen: Tensor | None = None,
    key_shift: Tensor | None = None,
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
    """The whole op, with the caches, scales and key screen updated in place, as in `sharp.plugins.ops.schema`.

    Nothing waits for the device, and grids and scratch memory follow from shapes alone: a call can be captured in a
    CUDA graph. A block or slot that the caches do not have is read and stored nowhere. The tensors must be contiguous
    and on one device, the block size a power of two of at least 16.

    Returns:
        output [tokens, q_heads, value_dim], the two caches, and stats float32 [tokens, q_heads, stats_columns].

    Raises:
        InputError: an attribute, dtype or size that the kernels lack.
    """
    tokens, q_heads, head_dim = query.shape
    kv_heads, value_dim, block_size = key.shape[1], value.shape[2], key_cache.shape[3]
    if q_heads % kv_heads:
        raise InputError(f"query has {q_heads} heads and key {kv_heads}; the first must be a multiple of the second")
    attributes = Attributes(
        normalizer, scale, alpha, temperature_coefficients, entropy_threshold, softcap, window, causal, stats_columns
    )
    options = attributes.options(
        query,
        value,
        key_cache,
        block_size=block_size,
        contiguous=False,
        head_params=head_params,
        alibi_slopes=alibi_slopes,
        collect_stats=collect_stats,
        screened=key_screen is not None and len(key_screen) > 0,  # one without blocks: there is none
    )
    if value_cache.dtype != key_cache.dtype:
        raise InputError(
            f"value_cache is {value_cache.dtype} and key_cache {key_cache.dtype}; both must be of one dtype"
        )
    if options.quantized and (key_scale is None or value_scale is None):
        raise InputError(f"an {options.cache_dtype} cache needs key_scale and value_scale")
    sequences, max_blocks = block_table.shape
    shapes = Shapes(tokens, sequences, max_blocks, q_heads, kv_heads, device_of(query.device)[1])
    check_shapes(
        key=(key, (tokens, kv_heads, head_dim)),
        value=(value, (tokens, kv_heads, value_dim)),
        key_cache=(key_cache, (key_cache.shape[0], kv_heads, head_dim, block_size)),
        value_cache=(value_cache, (key_cache.shape[0], kv_heads, block_size, value_dim)),
        slot_mapping=(slot_mapping, (tokens,)),
        query_start=(query_start, (sequences + 1,)),
        context_lens=(context_lens, (sequences,)),
        head_params=(head_params, (q_heads, *(() if head_params is None else head_params.shape[1:]))),
        alibi_slopes=(alibi_slopes, (q_heads,)),
        key_scale=(key_scale, (key_cache.shape[0], kv_heads)),
        value_scale=(value_scale, (key_cache.shape[0], kv_heads)),
        key_screen=(
            key_screen if options.screened else None,
            (key_cache.shape[0], kv_heads, screen_bytes(head_dim, block_size)),
        ),
        key_shift=(key_shift, (kv_heads, head_dim)),
    )
    if key_screen is not None and key_screen.dtype != torch.int8:
        raise InputError(f"key_screen is {key_screen.dtype}; it must be int8")
    output = query.new_empty(tokens, q_heads, value_dim)
    stats = torch.empty(tokens, q_heads, stats_columns, dtype=torch.float32, device=query.device)
    # What is absent is never read; a null pointer would make another variant.
    arguments = attributes.arguments() | {
        "query": query,
        "key": key,
        "value": value,
        # e4m3 by its bytes: the kernels know the numbers on every GPU.
        "key_cache": key_cache.view(torch.uint8) if options.cache_dtype == "fp8" else key_cache,
        "value_cache": value_cache.view(torch.uint8) if options.cache_dtype == "fp8" else value_cache,
        "key_scale": stats if key_scale is None else key_scale,
        "value_scale": stats if value_scale is None else value_scale,
        "slot_mapping": slot_mapping,
        "block_table": block_table,
        "query_start": query_start,
        "context_lens": context_lens,
        "head_params": stats if head_params is None else head_params,
        "alibi_slopes": stats if alibi_slopes is None else alibi_slopes,
        "collect_stats": query.new_empty(0, dtype=torch.bool) if collect_stats is None else collect_stats,
        "output": output,
        "stats": stats,
        "parameters": 0 if head_params is None else head_params.shape[-1],
        "slots": key_cache.shape[0] * block_size,
    }
    if options.screened and key_screen is not None:
        shifts = {"key_shift": stats if key_shift is None else key_shift, "shifted": int(key_shift is not None)}
        words = key_screen.view(torch.int32) if key_screen.is_contiguous() else key_screen
        arguments |= {"key_screen": words, **shifts}
    if tokens > 0:
        run_kernels(options, shapes, query.device, arguments)
    return output, key_cache, value_cache, stats
