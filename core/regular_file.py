"""Reading of small files that another program may replace at any time: only regular files, up to a size limit."""

import os
import stat
from pathlib import Path

from sharp.core.errors import InputError


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """Return the content of the regular file `path`.

    A FIFO, a device or a socket is refused without reading from it, because the read could block forever or never end.

    Raises:
        InputError: `path` is no regular file, or has more than `most_bytes` bytes.
        OSError: the file cannot be read.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. The flag has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is no regular file; give one that can be read to its end")
        content = file.read(min(status.st_size, most_bytes) + 1)  # a read takes memory for all bytes that it asks for
    if len(content) > most_bytes:
        raise InputError(f"{path} has more than {most_bytes} bytes, the limit; give a smaller file")
    return content
