"""A program from a file may compute anything, tensors larger than the machine's memory among them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT = 2**28  # bytes that are left to everybody else
MASKS = 6 * 2**30  # bytes in which any mask of an attention can be evaluated
COPIES = 8  # of all weights


@contextmanager
def memory_of_program(size: int) -> Iterator[None]:
    """Inside, what a program in a file of `size` bytes has no use for cannot be allocated: that fails, kills nobody."""
    used, free = _bytes(Path("/proc/self/status"), "VmData"), _bytes(Path("/proc/meminfo"), "MemAvailable")
    if used is None or free is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [used + max(KEPT, min(free - KEPT, MASKS + COPIES * size)), soft, hard]
    resource.setrlimit(resource.RLIMIT_DATA, (min(one for one in limits if one != resource.RLIM_INFINITY), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _bytes(path: Path, name: str) -> int | None:
    """An entry of a file of /proc; None where the system has no such file."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found) * 1024
