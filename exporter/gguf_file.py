"""Reading a GGUF file once: transformers parses its header anew for configuration, weights and tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import gguf


@contextmanager
def one_reader() -> Iterator[None]:
    """Inside, every `gguf.GGUFReader` of one path is the same reader, and so is every map of tensor names.

    Of a vocabulary of 49,152 tokens a reader takes 4 s to make, and transformers 5.23 makes four. It makes the map of
    30 layers, the same each time, for each of 397 modules: another 4 s.
    """
    library: Any = gguf
    kept = {name: getattr(library, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, made in kept.items():
        setattr(library, name, cache(made))
    try:
        yield
    finally:
        for name, made in kept.items():
            setattr(library, name, made)
