"""The number of weights that the headers of a checkpoint's files declare, read without torch."""

import json
import math
from collections.abc import Iterator
from operator import index
from pathlib import Path

from sharp.core.errors import InputError

MOST_HEADER = 2**23  # bytes of a header of safetensors
MOST_WEIGHTS = 2**62  # more are a damaged header
# The beginnings of files that stand in the place of weights, and what they are.
OTHERS = {
    b"version https://git-lfs": "is a pointer of Git LFS and not the file itself; fetch the file with: git lfs pull",
    b"<!doctype html": "is a web page and no model; download the file itself (/resolve/ in its link, not /blob/)",
    b"<html": "is a web page and no model; download the file itself (/resolve/ in its link, not /blob/)",
}


def declared_weights(path: Path) -> int:
    """Return the number of weights in a .gguf file, a .safetensors file, or a folder of .safetensors files.

    Other files count as 0, and so do damaged headers, which the readers of the formats refuse.

    Raises:
        InputError: a file is empty or cut off, or is a pointer of Git LFS or a web page in its place.
    """
    return sum(_of_gguf(file) if file.suffix == ".gguf" else _of_safetensors(file) for file in _files(path))


def _files(path: Path) -> Iterator[Path]:
    """Yield the .safetensors or .gguf files of a folder, or the file itself.

    Raises:
        InputError: a file is empty or is another format, such as HTML or a Git LFS pointer.
    """
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else (path,):
        if file.is_file() and file.suffix in (".gguf", ".safetensors"):
            with file.open("rb") as opened:
                beginning = opened.read(32).lstrip().lower()
            if not file.stat().st_size:
                raise InputError(f"{file} is empty; download or copy it again")
            for start, what in OTHERS.items():
                if beginning.startswith(start):
                    raise InputError(f"{file} {what}")
            yield file


def _of_gguf(path: Path) -> int:
    """Return the number of weights in a GGUF file; 0 if it is damaged, which its reader reports later."""
    from sharp.exporter.checkpoints.gguf.file import GgufFile  # imports numpy

    try:
        return GgufFile(path).elements()
    except InputError:
        raise
    except Exception:  # the library gguf raises errors of several classes; the reader of the format reports them
        return 0


def _of_safetensors(path: Path) -> int:
    """Return the number of weights in a safetensors file by its header; 0 if the header is damaged.

    Raises:
        InputError: the file is shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER:
            return 0
        try:
            tensors = [entry for name, entry in json.loads(file.read(length)).items() if name != "__metadata__"]
            end = 8 + length + max((index(entry["data_offsets"][1]) for entry in tensors), default=0)
            weights = sum(math.prod(map(index, entry["shape"])) for entry in tensors)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return 0
    if end > size:
        raise InputError(
            f"{path} is cut off: it has {size:,} bytes, and its header describes {end:,}; download or copy it again"
        )
    return weights if weights < MOST_WEIGHTS else 0
