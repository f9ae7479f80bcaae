"""Reading a GGUF file once: transformers parses its header anew for configuration, weights and tokenizer."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from sharp.plugins.errors import InputError

HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata entries
MOST_TENSORS, MOST_ENTRIES = 20_000, 10_000


class Reader(gguf.GGUFReader):
    """GGUF's own reader, whose file is a plain array: of a memmap every slice, one a token, runs Python code."""

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the file, still mapped."""
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)


def check_gguf_header(path: Path) -> None:
    """Refuse a file of far more tensors than any model has: the reader makes arrays of each.

    Raises:
        InputError: it has more than `MOST_TENSORS`, or `MOST_ENTRIES` of metadata, or is no GGUF file.
    """
    with path.open("rb") as file:
        start = file.read(HEADER.size)
    if len(start) < HEADER.size or not start.startswith(b"GGUF"):
        raise InputError(f"{path} cannot be read as a GGUF file: its header is damaged; copy it again")
    _, _, tensors, entries = HEADER.unpack(start)
    for name, count, most in (("tensors", tensors, MOST_TENSORS), ("entries of metadata", entries, MOST_ENTRIES)):
        if count > most:
            raise InputError(f"{path} has {count} {name} by its header; the limit is {most}, so it is damaged")


@contextmanager
def one_reader() -> Iterator[None]:
    """Inside, every `gguf.GGUFReader` of one path is the same reader, and so is every map of tensor names.

    Of a vocabulary of 49,152 tokens a reader takes 4 s to make, and transformers 5.23 makes four. It makes the map of
    30 layers, the same each time, for each of 397 modules: another 4 s.
    """
    library: Any = gguf
    kept = {name: getattr(library, name) for name in ("GGUFReader", "get_tensor_name_map")}
    library.GGUFReader, library.get_tensor_name_map = cache(Reader), cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        for name, made in kept.items():
            setattr(library, name, made)
