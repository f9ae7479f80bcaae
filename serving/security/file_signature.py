"""Files that may be replaced while the server runs, as Kubernetes does with secrets."""

from collections.abc import Iterable
from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...]


def signature(files: Iterable[Path]) -> Signature:
    """What changes when one of the files is written or replaced; None stands for a file that cannot be read."""
    return tuple(_of(file) for file in files)


def _of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
