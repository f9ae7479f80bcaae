"""The size of the key-value cache, in blocks, and the memory that is available for it."""

from sharp.core.manifest import Manifest
from sharp.plugins.op.cache_tensors import CacheTensor, cache_tensors
from sharp.serving.api.errors import InputError
from sharp.serving.config import EngineConfig

# By default the cache has room for the longest request, but for at least this many tokens.
DEFAULT_TOKENS = 16 * 2048
MEMORY_SHARE = 0.5
DEFAULT = EngineConfig()


def tensors_of(manifest: Manifest) -> tuple[CacheTensor, ...]:
    """Return descriptions of all tensors of a model's paged cache: keys, values, scales and screens."""
    return cache_tensors(manifest.cache, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.value_dim)


def bytes_per_block(manifest: Manifest, *, screened: bool = True) -> int:
    """Return the bytes of one cache block over all layers, with the model's key screens if `screened`."""
    return sum(tensor.block_bytes for tensor in tensors_of(manifest) if screened or not tensor.is_screen)


def cache_blocks(
    manifest: Manifest,
    cache_tokens: int | None,
    available_bytes: int,
    device: str = "cpu",
    engine: EngineConfig = DEFAULT,
    *,
    screened: bool = True,
) -> int:
    """Return the number of cache blocks: for `cache_tokens` if given, else a default of at most half the memory.

    On a GPU ("cuda") the default is `engine.gpu_memory_share` of the memory, so that more sequences run together. The
    blocks include key screens if `screened`.

    Raises:
        InputError: the cache would be larger than the memory.
    """
    block_size = manifest.cache.block_size
    block_bytes = bytes_per_block(manifest, screened=screened)
    if cache_tokens is None and device == "cuda":
        return max(1, int(available_bytes * engine.gpu_memory_share) // block_bytes)
    if cache_tokens is None:
        target = -(-max(engine.max_context or manifest.max_context, DEFAULT_TOKENS) // block_size)
        return max(1, min(target, int(available_bytes * MEMORY_SHARE) // block_bytes))
    blocks = -(-cache_tokens // block_size)
    if blocks * block_bytes > available_bytes:
        raise InputError(
            f"cache_tokens is {cache_tokens}, which needs {blocks * block_bytes >> 20} MiB; "
            f"there are {available_bytes >> 20} MiB, enough for {available_bytes // block_bytes * block_size}"
        )
    return blocks
