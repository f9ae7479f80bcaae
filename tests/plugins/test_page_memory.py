"""Memory of caches holds zeros, is page-aligned, lies in huge pages, and is taken only as it is written."""

import ctypes
import mmap
import platform
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharp.plugins.cpu import page_memory
from sharp.plugins.op.cache_tensors import CacheTensor

MIB = 1 << 20
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def kb(field: str) -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def huge_kb_of(memory: mmap.mmap) -> int:
    """Return how many KB of one mapping lie in huge pages.

    Other mappings do not count, because Linux moves them into huge pages whenever it likes.
    """
    address, inside = ctypes.addressof(ctypes.c_char.from_buffer(memory)), False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("the mapping is gone")


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
    assert kb("Rss") - before < 4096  # one page of 2 MB, and any other memory that the process took meanwhile
    cache[...] = 1
    assert 63 * 1024 < kb("Rss") - before < 68 * 1024
    assert value.data_ptr() % 4096 == 0


def test_large_arrays_lie_in_huge_pages() -> None:
    if not ENABLED.is_file() or "[never]" in ENABLED.read_text(encoding="ascii"):
        pytest.skip("this system has no transparent huge pages; echo madvise > " + str(ENABLED))
    before = kb("AnonHugePages")
    array = page_memory.zeros((64 * MIB,), np.int8)
    array[...] = 1
    # 64 MiB are 32 huge pages, of which fragmented memory may lack some.
    assert kb("AnonHugePages") - before >= 32 * 1024


def linux() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", platform.release())[:2]
    return int(major), int(minor)


def test_what_a_library_allocates_is_moved_into_huge_pages_and_keeps_its_contents() -> None:
    if not ENABLED.is_file() or "[never]" in ENABLED.read_text(encoding="ascii") or linux() < (6, 1):
        pytest.skip("this system cannot move memory into huge pages; it needs Linux 6.1 and madvise in " + str(ENABLED))
    outside = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    outside.write(b"\1" * (64 * MIB))
    before = kb("AnonHugePages")
    with page_memory.into_huge_pages():
        inside = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        inside.write(b"\2" * (64 * MIB))
        assert huge_kb_of(inside) == 0
    assert 32 * 1024 <= kb("AnonHugePages") - before <= 100 * 1024  # the 64 MB from outside the block are not moved
    assert inside[:] == b"\2" * (64 * MIB)


def test_memory_that_was_never_written_is_not_taken_from_the_system() -> None:
    before = kb("Rss")
    with page_memory.into_huge_pages():
        memory = mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert kb("Rss") - before < 8 * 1024
    memory.close()


def test_a_system_that_tells_no_mappings_keeps_its_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_memory, "MAPPINGS", tmp_path / "none")
    with page_memory.into_huge_pages():
        memory = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(b"\1" * (16 * MIB))
    assert huge_kb_of(memory) == 0


RANGES = st.sets(st.integers(0, 40), max_size=12).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(RANGES, RANGES)
def test_only_what_is_new_is_moved(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    def pages(ranges: list[tuple[int, int]]) -> set[int]:
        return {page for begin, end in ranges for page in range(begin, end)}

    assert pages(list(page_memory._new(before, after))) == pages(after) - pages(before)


def test_more_than_the_system_has_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no 1073741824 MiB of memory"):
        page_memory.zeros((1 << 50,), np.int8)


def test_more_than_there_are_addresses_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="MiB of memory"):
        page_memory.zeros((1 << 70,), np.int8)
