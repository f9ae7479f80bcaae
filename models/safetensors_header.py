"""How many tensors a safetensors file has, before anything makes an object of each."""

import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sharp.plugins.errors import InputError

MOST_BYTES = 2**23  # of a header; a tensor takes one to two hundred
MOST_TENSORS = 20_000  # the largest files have some thousand


def check_header(path: Path) -> int:
    """The number of tensors of a file; 400,000 empty ones took a minute and 1 GB to read.

    Raises:
        InputError: there are more than `MOST_TENSORS`, or it is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if MOST_BYTES < size <= path.stat().st_size:  # beyond the file's end it is damaged: `safe_open` says so
            raise InputError(
                f"{path} has a header of {size} bytes; the limit is {MOST_BYTES}, save it in several files"
            )
        with safe_open(path, framework="np") as tensors:
            count = len(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged or not a safetensors file; copy or save it again") from error
    if count > MOST_TENSORS:
        raise InputError(f"{path} has {count} tensors; the limit is {MOST_TENSORS}, save it in several files")
    return count
