"""Reading a GGUF file once: transformers parses its header anew for configuration, weights and tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gguf


@contextmanager
def one_reader() -> Iterator[None]:
    """Inside, every `gguf.GGUFReader` of one path is the same reader.

    Of a vocabulary of 49,152 tokens a reader takes 4 s to make, and transformers 5.23 makes four.
    """
    library: Any = gguf
    reader = library.GGUFReader
    library.GGUFReader = cache(reader)
    try:
        yield
    finally:
        library.GGUFReader = reader
