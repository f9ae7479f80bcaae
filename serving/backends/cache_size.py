"""How many tokens the key-value cache holds."""

from collections.abc import Iterator
from pathlib import Path

from sharp.plugins.cache_tensors import CacheTensor, cache_tensors
from sharp.plugins.manifest import Manifest
from sharp.serving.api.errors import InputError
from sharp.serving.config import EngineConfig
from sharp.serving.machine import groups

# By default there is room for the longest request, or for this many tokens where the context is short.
DEFAULT_TOKENS = 16 * 2048
MEMORY_SHARE = 0.5
DEFAULT = EngineConfig()
MEMINFO = Path("/proc/meminfo")
# Of a control group: its limit, what it uses, and in `memory.stat` what of that are files that can be read again.
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def tensors_of(manifest: Manifest) -> tuple[CacheTensor, ...]:
    """The tensors of the model's cache."""
    return cache_tensors(manifest.cache, manifest.layers, manifest.kv_heads, manifest.head_dim, manifest.value_dim)


def bytes_per_block(manifest: Manifest, *, screened: bool = True) -> int:
    """The cache bytes of one block over all layers, with the model's key screens or without."""
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
    """The blocks of the cache: for `cache_tokens` if given, else for the default that at most half the memory allows.

    On a GPU ("cuda") the default is `engine.gpu_memory_share` of the memory: more sequences run together. Key screens
    are counted unless the backend has none.

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


def available_memory() -> int:
    """Bytes of memory that this process can still take."""
    meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *(left for group in groups("memory") for left in _left(group))]))


def _left(group: Path) -> Iterator[int]:
    """What the limit of a control group leaves. Files that were read count as used there until something needs room."""
    for limit, used, files in GROUP_FILES:
        try:
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            taken = int((group / used).read_text(encoding="ascii")) - int(stat.get(files, 0))
            yield int((group / limit).read_text(encoding="ascii")) - taken
        except (OSError, ValueError):  # another version's group, the root, or the limit is the word "max"
            continue
