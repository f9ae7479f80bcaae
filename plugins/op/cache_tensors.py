"""The tensors of a paged cache as `sharp.json` describes them: names in the graph, shapes, types and memory."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime

from sharp.core.manifest import Cache, CacheDtype
from sharp.plugins.cpu import page_memory
from sharp.plugins.op.key_screen import screen_bytes

# The numpy type that holds each cache type, and the number of the cache type in ONNX. numpy has neither bfloat16 nor
# fp8 (ONNX's FLOAT8E4M3FN), so their bits are held in unsigned integers.
ELEMENTS: dict[CacheDtype, tuple[type[np.generic], int]] = {
    "float32": (np.float32, 1),
    "int8": (np.int8, 3),
    "float16": (np.float16, 10),
    "bfloat16": (np.uint16, 16),
    "fp8": (np.uint8, 17),
}


@dataclass(frozen=True)
class CacheTensor:
    """A tensor of a paged cache in a model's graph: an input, and an output of the same type and shape.

    `name` is a kind and the number of a layer ("key_cache.0"). `block_shape` is the shape of one block, without the
    first axis, which counts blocks.
    """

    name: str
    dtype: CacheDtype
    block_shape: tuple[int, ...]

    @property
    def updated_name(self) -> str:
        """The name of the output that holds this tensor after the new tokens are stored ("key_cache_out.0")."""
        kind, _, layer = self.name.rpartition(".")
        return f"{kind}_out.{layer}"

    @property
    def is_screen(self) -> bool:
        """Whether the tensor is a key screen. A screen may have any number of blocks; with none, all keys are read."""
        return self.name.startswith("key_screen.")

    @property
    def block_bytes(self) -> int:
        """The number of bytes of one block."""
        return prod(self.block_shape) * np.dtype(ELEMENTS[self.dtype][0]).itemsize

    def make(self, blocks: int) -> Any:
        """Return an OrtValue of zeros [blocks, *block_shape] in host memory.

        The system provides memory only for pages that are written.

        Raises:
            MemoryError: the system has no such range of addresses.
        """
        kind, number = ELEMENTS[self.dtype]
        array = page_memory.zeros((blocks, *self.block_shape), kind)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)


def cache_tensors(cache: Cache, layers: int, kv_heads: int, head_dim: int, value_dim: int) -> tuple[CacheTensor, ...]:
    """Return all tensors of a paged cache, layer by layer.

    A layer has its key cache, its value cache, the tensors of `cache.beside` (scales, one per block and head), and its
    key screen if it has one. `cache.heads` gives the number of KV heads of each layer; if it is not set, `layers`
    layers have `kv_heads` each.
    """
    found: list[CacheTensor] = []
    for number, heads in enumerate(cache.heads or (kv_heads,) * layers):
        keys, values = (heads, head_dim, cache.block_size), (heads, cache.block_size, value_dim)
        found.append(CacheTensor(f"key_cache.{number}", cache.dtype, keys))
        found.append(CacheTensor(f"value_cache.{number}", cache.dtype, values))
        found += [CacheTensor(f"{name}.{number}", "float32", (heads,)) for name in cache.beside]
        if number in cache.key_screens:
            found.append(CacheTensor(f"key_screen.{number}", "int8", (heads, screen_bytes(head_dim, cache.block_size))))
    return tuple(found)
