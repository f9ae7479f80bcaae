"""The check of a safetensors file's number of tensors, before anything makes an object for each tensor."""

import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sharp.core.errors import InputError

MOST_BYTES = 2**23  # of a header; a tensor's entry takes one to two hundred bytes
MOST_TENSORS = 20_000  # the largest known files have some thousand


def check_header(path: Path) -> int:
    """Check and return the number of tensors of a file, because reading 400,000 empty tensors took a minute and 1 GB.

    Raises:
        InputError: there are more than `MOST_TENSORS` (20,000) or a header of more than 8 MiB, or the file is missing
            or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if MOST_BYTES < size <= path.stat().st_size:  # `safe_open` refuses a header longer than the file
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
