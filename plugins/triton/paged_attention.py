"""`PagedAttention` on a GPU under PyTorch, with the kernels of `variants.py`."""

from typing import Unpack

import torch
from torch import Tensor

from sharp.core.errors import InputError
from sharp.plugins.op.attributes import Attributes, AttributeValues
from sharp.plugins.op.definition import PAGED_ATTENTION
from sharp.plugins.triton.launch_plan import Shapes
from sharp.plugins.triton.launching import arguments_of, check_shapes, device_of, options_of, run_kernels


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
    **given: Unpack[AttributeValues],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `PagedAttention` on a GPU, with caches, scales and key screen updated in place.

    Nothing waits for the device, and grids and scratch memory follow from shapes alone, so a call can be captured in a
    CUDA graph. Blocks and slots that the caches do not have are neither read nor written. The tensors must be
    contiguous and on one device, and the block size a power of two of at least 16. Attributes are keywords; normalizer
    and scale are required.

    Args:
        query: [tokens, q_heads, head_dim], tokens of all sequences packed, positions applied.
        key: [tokens, kv_heads, head_dim]; kv_heads divides q_heads.
        value: [tokens, kv_heads, value_dim].
        key_cache: [blocks, kv_heads, head_dim, block_size], of the query's type, int8 or float8_e4m3fn; for a float32
            query also float16 or bfloat16.
        value_cache: [blocks, kv_heads, block_size, value_dim].
        slot_mapping: int32 [tokens] block * block_size + offset, -1 = do not store.
        block_table: int32 [sequences, max_blocks], -1 = unused.
        query_start: int32 [sequences + 1], cumulative number of tokens.
        context_lens: int32 [sequences], tokens in the cache before this step.
        head_params: float32 [q_heads, P], the normalizer's own columns, then the sink's column if there are sinks.
        alibi_slopes: float32 [q_heads].
        collect_stats: one bool, which is read on the device.
        key_scale: float32 [blocks, kv_heads], required for int8 and fp8 caches.
        value_scale: float32 [blocks, kv_heads].
        key_screen: int8 [blocks, kv_heads, screen_bytes], for entmax over a cache of floats; without blocks: none.
        key_shift: float32 [kv_heads, head_dim], the shift of the screen; None: zeros.
        given: the op's attributes.

    Returns:
        output [tokens, q_heads, value_dim], the two caches themselves, and stats float32 [tokens, q_heads,
        stats_columns], zeros unless `collect_stats` is true.

    Raises:
        InputError: the kernels do not support an attribute, dtype or size, or a tensor is not contiguous, or on the CPU
            without Triton's interpreter.
        SharpError: the native library, which plans the launches, is not built.
    """
    screened = None if key_screen is None or len(key_screen) == 0 else key_screen  # no blocks: no screen
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slot_mapping,
        "block_table": block_table,
        "query_start": query_start,
        "context_lens": context_lens,
        "head_params": head_params,
        "alibi_slopes": alibi_slopes,
        "collect_stats": collect_stats,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "key_screen": screened,
        "key_shift": key_shift,
    }
    sizes = check_shapes(PAGED_ATTENTION, inputs)
    attributes = Attributes(**given)
    options = options_of(attributes, query, value, key_cache, inputs, sizes["block_size"], contiguous=False)
    if value_cache.dtype != key_cache.dtype:
        raise InputError(
            f"value_cache is {value_cache.dtype} and key_cache {key_cache.dtype}; both must be of one dtype"
        )
    if options.quantized and (key_scale is None or value_scale is None):
        raise InputError(f"an {options.cache_dtype} cache needs key_scale and value_scale")
    if key_screen is not None and key_screen.dtype != torch.int8:
        raise InputError(f"key_screen is {key_screen.dtype}; it must be int8")
    output = query.new_empty(*query.shape[:2], value.shape[2])
    stats = torch.empty(*query.shape[:2], attributes.stats_columns, dtype=torch.float32, device=query.device)
    # The kernels take numbers of e4m3 as bytes, which they decode themselves on every GPU, and a screen as words.
    words = {"key_cache": torch.uint8, "value_cache": torch.uint8} if options.cache_dtype == "fp8" else {}
    if screened is not None and screened.is_contiguous():
        words = {"key_screen": torch.int32}
    arguments = arguments_of(PAGED_ATTENTION, attributes, inputs, output, stats) | {
        "slots": sizes["blocks"] * sizes["block_size"],
        "shifted": int(key_shift is not None),
    }
    arguments |= {name: arguments[name].view(dtype) for name, dtype in words.items()}
    if len(query) > 0:
        sequences, max_blocks = block_table.shape
        shapes = Shapes(len(query), sequences, max_blocks, query.shape[1], key.shape[1], device_of(query.device)[1])
        run_kernels(options, shapes, query.device, arguments)
    return output, key_cache, value_cache, stats
