"""The tensors of a paged cache: names in the graph, shapes, types and memory, as `sharp.json` describes them."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime

from sharp.plugins import page_memory
from sharp.plugins.manifest import Cache, CacheDtype
from sharp.plugins.ops.key_screen import screen_bytes

# What numpy holds for each type, and its number in ONNX; numpy has neither bfloat16 nor fp8, which is FLOAT8E4M3FN.
ELEMENTS: dict[CacheDtype, tuple[type[np.generic], int]] = {
    "float32": (np.float32, 1),
    "int8": (np.int8, 3),
    "float16": (np.float16, 10),
    "bfloat16": (np.uint16, 16),
    "fp8": (np.uint8, 17),
}


@dataclass(frozen=True)
class CacheTensor:
    """An input of the graph that an output of the same type and shape follows; `block_shape` is that of one block."""

    name: str
    dtype: CacheDtype
    block_shape: tuple[int, ...]

    @property
    def updated_name(self) -> str:
        """The output with the new tokens stored."""
        kind, _, layer = self.name.rpartition(".")
        return f"{kind}_out.{layer}"

    @property
    def is_screen(self) -> bool:
        """Whether it is a key screen, of which any number of blocks may be given: with none, all keys are read."""
        return self.name.startswith("key_screen.")

    @property
    def block_bytes(self) -> int:
        """Memory of one block."""
        return prod(self.block_shape) * np.dtype(ELEMENTS[self.dtype][0]).itemsize

    def make(self, blocks: int) -> Any:
        """Zeros for so many blocks, as an OrtValue; memory that is never written is never taken from the system."""
        kind, number = ELEMENTS[self.dtype]
        array = page_memory.zeros((blocks, *self.block_shape), kind)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)


def cache_tensors(cache: Cache, layers: int, kv_heads: int, head_dim: int, value_dim: int) -> tuple[CacheTensor, ...]:
    """All tensors of a cache, layer by layer."""
    found: list[CacheTensor] = []
    for number, heads in enumerate(cache.heads or (kv_heads,) * layers):
        keys, values = (heads, head_dim, cache.block_size), (heads, cache.block_size, value_dim)
        found.append(CacheTensor(f"key_cache.{number}", cache.dtype, keys))
        found.append(CacheTensor(f"value_cache.{number}", cache.dtype, values))
        found += [CacheTensor(f"{name}.{number}", "float32", (heads,)) for name in cache.beside]
        if number in cache.key_screens:
            found.append(CacheTensor(f"key_screen.{number}", "int8", (heads, screen_bytes(head_dim, cache.block_size))))
    return tuple(found)
