"""Memory of caches: zeros, page-aligned, in huge pages, and no more of it than was asked for."""

import re
from pathlib import Path

import numpy as np
import pytest

from sharp.plugins import page_memory
from sharp.plugins.cache_tensors import CacheTensor

MIB = 1 << 20
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def kb(field: str) -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("shape", [(3, 5, 7), (64, 3, 64, 16), (0, 4)])
def test_zeros_at_the_start_of_a_page_that_can_be_written(shape: tuple[int, ...]) -> None:
    array = page_memory.zeros(shape, np.float32)
    assert array.shape == shape
    assert array.dtype == np.float32
    assert not array.any()
    assert array.ctypes.data % 4096 == 0
    array[...] = 1.5
    assert (array == 1.5).all()


def test_a_cache_takes_its_memory_when_it_is_written_and_no_more_than_its_size() -> None:
    tensor = CacheTensor("key_cache.0", "float32", (3, 64, 16))
    before = kb("Rss")
    value = tensor.make(64 * MIB // tensor.block_bytes)
    cache = value.numpy()
    assert kb("Rss") - before < 1024
    cache[0] = 1
    assert kb("Rss") - before < 4096  # one page of 2 MB, and what else the process did meanwhile
    cache[...] = 1
    assert 63 * 1024 < kb("Rss") - before < 68 * 1024
    assert value.data_ptr() % 4096 == 0


def test_large_arrays_lie_in_huge_pages() -> None:
    if not ENABLED.is_file() or "[never]" in ENABLED.read_text(encoding="ascii"):
        pytest.skip("this system has no transparent huge pages; echo madvise > " + str(ENABLED))
    before = kb("AnonHugePages")
    array = page_memory.zeros((64 * MIB,), np.int8)
    array[...] = 1
    # 64 MiB is 32 of them, of which fragmented memory may lack some.
    assert kb("AnonHugePages") - before >= 32 * 1024


def test_more_than_the_system_has_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no 1073741824 MiB of memory"):
        page_memory.zeros((1 << 50,), np.int8)


def test_more_than_there_are_addresses_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="MiB of memory"):
        page_memory.zeros((1 << 70,), np.int8)
