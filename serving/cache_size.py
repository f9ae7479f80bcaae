"""How many tokens the key-value cache holds."""

from pathlib import Path

from sharp.plugins.cache_tensors import CacheTensor, cache_tensors
from sharp.plugins.manifest import Manifest
from sharp.serving.errors import InputError

# By default there is room for the longest request, or for this many tokens where the context is short.
DEFAULT_TOKENS = 16 * 2048
MEMORY_SHARE = 0.5
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def tensors_of(manifest: Manifest) -> tuple[CacheTensor, ...]:
    """The tensors of the model's cache."""
    return cache_tensors(manifest.cache, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.value_dim)


def bytes_per_block(manifest: Manifest) -> int:
    """The cache bytes of one block over all layers."""
    return sum(tensor.block_bytes for tensor in tensors_of(manifest))


def cache_blocks(manifest: Manifest, cache_tokens: int | None, available_bytes: int) -> int:
    """The blocks of the cache: for `cache_tokens` if given, else for the default that at most half the memory allows.

    Raises:
        InputError: the cache would be larger than the memory.
    """
    block_size = manifest.cache.block_size
    block_bytes = bytes_per_block(manifest)
    if cache_tokens is None:
        wanted = -(-max(manifest.max_context, DEFAULT_TOKENS) // block_size)
        return max(1, min(wanted, int(available_bytes * MEMORY_SHARE) // block_bytes))
    blocks = -(-cache_tokens // block_size)
    if blocks * block_bytes > available_bytes:
        raise InputError(
            f"cache_tokens is {cache_tokens}, which needs {blocks * block_bytes >> 20} MiB; "
            f"there are {available_bytes >> 20} MiB, enough for {available_bytes // block_bytes * block_size}"
        )
    return blocks


def available_memory() -> int:
    """Bytes of memory that this process can still take."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        container = int(CGROUP_LIMIT.read_text(encoding="ascii")) - int(CGROUP_USED.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or the limit is the word "max"
        return available
    return min(available, container)
