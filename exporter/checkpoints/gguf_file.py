"""Reading a GGUF file once: transformers parses its header anew for configuration, weights and tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


class Reader(gguf.GGUFReader):
    """GGUF's own reader, whose file is a plain array: of a memmap every slice, one a token, runs Python code."""

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the file, still mapped."""
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)


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
