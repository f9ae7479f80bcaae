"""`PagedAttention` on a GPU under PyTorch, by the kernels of `variants.py`."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import DEFAULT_ALPHA, DEFAULT_ENTROPY_THRESHOLD, ICML2025_COEFFICIENTS, NORMALIZERS
from sharp.plugins.triton.options import Options, power_name
from sharp.plugins.triton.variants import (
    DTYPES,
    MOST_COEFFICIENTS,
    Kernel,
    Shapes,
    kernels,
    scratch,
    splits,
)

INTERPRETED = (90, 4)  # capability and multiprocessors that Triton's interpreter, which has no device, stands for


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
    temperature_coefficients: Sequence[float] = ICML2025_COEFFICIENTS,
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD,
    softcap: float = 0.0,
    window: int = -1,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole op, with the caches updated in place; inputs and attributes as in `sharp.plugins.ops.schema`.

    Nothing waits for the device, and grids and scratch memory follow from shapes alone: a call can be captured in a
    CUDA graph. The tensors must be contiguous and on one device, the block size a power of two of at least 16.

    Returns:
        output [tokens, q_heads, value_dim], the two caches, and stats float32 [tokens, q_heads, 4].

    Raises:
        InputError: an attribute, dtype or size that the kernels lack.
    """
    tokens, q_heads, head_dim = query.shape
    kv_heads, value_dim, block_size = key.shape[1], value.shape[2], key_cache.shape[3]
    if q_heads % kv_heads:
        raise InputError(f"query has {q_heads} heads and key {kv_heads}; the first must be a multiple of the second")
    options = make_options(
        normalizer,
        dtype=query.dtype,
        cache_dtype=key_cache.dtype,
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=block_size,
        statistics=collect_stats is not None,
        alibi=alibi_slopes is not None,
        softcap=softcap > 0,
        alpha=alpha,
    )
    if normalizer == "ssa" and (head_params is None or head_params.dim() != 2 or head_params.shape[1] < 2):
        raise InputError("ssa needs head_params [q_heads, 2]: b and n of every head")
    if len(temperature_coefficients) > MOST_COEFFICIENTS:
        count = len(temperature_coefficients)
        raise InputError(f"temperature_coefficients has {count} numbers; the kernels take {MOST_COEFFICIENTS}")
    capability, multiprocessors = _device(query.device)
    shapes = Shapes(tokens, block_table.shape[0], block_table.shape[1], q_heads, kv_heads, multiprocessors)
    _check_shapes(
        key=(key, (tokens, kv_heads, head_dim)),
        value=(value, (tokens, kv_heads, value_dim)),
        key_cache=(key_cache, (key_cache.shape[0], kv_heads, head_dim, block_size)),
        value_cache=(value_cache, (key_cache.shape[0], kv_heads, block_size, value_dim)),
        slot_mapping=(slot_mapping, (tokens,)),
        query_start=(query_start, (shapes.sequences + 1,)),
        context_lens=(context_lens, (shapes.sequences,)),
        head_params=(head_params, (q_heads, *(() if head_params is None else head_params.shape[1:]))),
        alibi_slopes=(alibi_slopes, (q_heads,)),
    )
    output = query.new_empty(tokens, q_heads, value_dim)
    stats = torch.empty(tokens, q_heads, 4, dtype=torch.float32, device=query.device)
    polynomial = (0.0,) * (MOST_COEFFICIENTS - len(temperature_coefficients)) + tuple(temperature_coefficients)
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slot_mapping,
        "block_table": block_table,
        "query_start": query_start,
        "context_lens": context_lens,
        # What is absent is never read; a null pointer would make another variant.
        "head_params": stats if head_params is None else head_params,
        "alibi_slopes": stats if alibi_slopes is None else alibi_slopes,
        "collect_stats": query.new_empty(0, dtype=torch.bool) if collect_stats is None else collect_stats,
        "output": output,
        "stats": stats,
        "parameters": 0 if head_params is None else head_params.shape[-1],
        "tokens": tokens,
        "sequences": shapes.sequences,
        "max_blocks": shapes.max_blocks,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "splits": splits(options, shapes),
        "window": window,
        "causal": int(causal),
        "scale": scale,
        "softcap": softcap,
        "alpha": alpha,
        "entropy_threshold": entropy_threshold,
        **{f"t{index}": number for index, number in enumerate(polynomial)},
        **{
            name: torch.empty(size, dtype=torch.float32, device=query.device)
            for name, size in scratch(options, shapes).items()
        },
    }
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) and not argument.is_contiguous():
            raise InputError(f"{name} is not contiguous; the kernels read and write whole tensors: give a copy")
    if tokens > 0:
        for kernel in _kernels(options, capability):
            if kernel.needed(shapes):
                launch(kernel, shapes, arguments)
    return output, key_cache, value_cache, stats


def _check_shapes(**expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raises InputError for the first tensor of another shape: the kernels would read and write beside it."""
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")


def make_options(
    normalizer: str,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    block_size: int,
    statistics: bool,
    alibi: bool,
    softcap: bool,
    alpha: float,
) -> Options:
    """The compile-time options of a call, checked.

    Raises:
        InputError: the kernels lack the normalizer, a dtype or a size.
    """
    if normalizer not in NORMALIZERS:
        raise InputError(f"normalizer is {normalizer!r}; it must be one of {', '.join(NORMALIZERS)}")
    for name, kind in (("query", dtype), ("key_cache", cache_dtype)):
        if str(kind).removeprefix("torch.") not in DTYPES:
            raise InputError(f"{name} is {kind}; the Triton kernels take {', '.join(DTYPES)}")
    if block_size < 16 or block_size & (block_size - 1):
        raise InputError(f"the block size is {block_size}; the Triton kernels need a power of two of at least 16")
    if normalizer == "entmax" and not alpha > 1:
        raise InputError(f"alpha is {alpha}; entmax needs alpha > 1")
    return Options(
        normalizer,
        str(dtype).removeprefix("torch."),
        str(cache_dtype).removeprefix("torch."),
        head_dim,
        value_dim,
        block_size,
        statistics,
        alibi,
        softcap,
        power_name(alpha) if normalizer == "entmax" else "",
    )


def launch(kernel: Kernel, shapes: Shapes, arguments: dict[str, Any]) -> None:
    """Start one kernel on the current stream.

    Raises:
        InputError: the tensors are on the CPU, where only Triton's interpreter can run the kernels.
    """
    if arguments["query"].device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise InputError(
            "query is on the CPU; the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 to try them"
        )
    given = {name: arguments[name] for name, kind in kernel.signature.items() if kind != "constexpr"}
    kernel.function[kernel.grid(shapes)](**given, **kernel.constants, num_warps=kernel.warps, num_stages=kernel.stages)


@lru_cache(maxsize=256)
def _kernels(options: Options, capability: int) -> tuple[Kernel, ...]:
    return kernels(options, capability)


@cache
def _device(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count
