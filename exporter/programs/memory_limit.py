"""A limit on memory, because a program from a file may compute tensors larger than the machine's memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT = 2**28  # bytes that are left to other processes
MASKS = 6 * 2**30  # bytes in which any mask of an attention can be evaluated
COPIES = 8  # how often all weights fit into the limit


@contextmanager
def memory_of_program(size: int) -> Iterator[None]:
    """Limit the memory of this process to what a program in a file of `size` bytes can have a use for.

    An allocation above the limit raises MemoryError in Python and RuntimeError in torch, instead of waking the system's
    out-of-memory killer. A system without /proc gets no limit.
    """
    used, free = _bytes(Path("/proc/self/status"), "VmData"), _bytes(Path("/proc/meminfo"), "MemAvailable")
    if used is None or free is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [used + max(KEPT, min(free - KEPT, MASKS + COPIES * size)), soft, hard]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit for limit in limits if limit != resource.RLIM_INFINITY), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _bytes(path: Path, name: str) -> int | None:
    """Read an entry of a file of /proc in bytes; None if the system has no such file or entry."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found) * 1024
