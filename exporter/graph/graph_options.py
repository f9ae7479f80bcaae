"""The options of a graph other than its norm: precisions, sizes, the version of ONNX."""

from dataclasses import dataclass
from typing import Literal

import torch

from sharp.core.errors import InputError
from sharp.core.manifest import CacheDtype, Dtype, PositionScheme, Quantization, Target
from sharp.exporter.graph.lowering import OPSETS
from sharp.models.config import SharpConfig
from sharp.plugins.op.attributes import SCALED_CACHES

BLOCK_MULTIPLE = 16  # kernels read 16 keys at a time and are three times slower with other block sizes
MOST_BLOCK = 1024
MOST_CONTEXT = 2**24  # float32 represents positions exactly up to this number

TORCH_DTYPES: dict[CacheDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
SCALED_DTYPES = tuple(dtype for name, dtype in TORCH_DTYPES.items() if name in SCALED_CACHES)


@dataclass(frozen=True)
class GraphOptions:
    """The options of a graph that the user chose.

    `kv_dtype` is the type of the paged cache; None means `dtype`. With `max_context` None, the checkpoint's context is
    kept. `key_screen` "auto" adds key screens where they were measured to pay: a float32 cache, a context of 8,192
    tokens or more, and positions without ALiBi.
    """

    dtype: Dtype = "float32"
    kv_dtype: CacheDtype | None = None
    quantize: Quantization | None = None
    block_size: int = BLOCK_MULTIPLE
    max_context: int | None = None
    opset: int = 23
    key_screen: Literal["auto", "int8", "none"] = "auto"

    def check(self, cache: str, target: Target) -> None:
        """Check the options, alone and together with `cache` (paged, contiguous or none) and `target`.

        Raises:
            InputError: a value cannot work, or no runtime could run a model with these options.
        """
        if not (self.block_size % BLOCK_MULTIPLE == 0 and 0 < self.block_size <= MOST_BLOCK):
            raise InputError(
                f"--block-size is {self.block_size}, but must be a multiple of {BLOCK_MULTIPLE} up to {MOST_BLOCK}"
            )
        if self.max_context is not None and not 0 < self.max_context <= MOST_CONTEXT:
            raise InputError(f"--max-context is {self.max_context}, but must be from 1 to {MOST_CONTEXT}")
        if self.opset not in OPSETS:
            raise InputError(f"--opset is {self.opset}, but must be from {OPSETS[0]} to {OPSETS[-1]}")
        if cache != "paged" and self.kv_dtype is not None:
            raise InputError(f"--kv-dtype is for --cache paged; with --cache {cache}, leave it out")
        if self.key_screen == "int8" and (cache != "paged" or target != "onnxruntime" or self.scaled):
            raise InputError(
                "--key-screen int8 is for --cache paged, --target onnxruntime and a cache of floats; leave it out"
            )
        if cache != "paged" and self.block_size != BLOCK_MULTIPLE:
            raise InputError(f"--block-size is for --cache paged; with --cache {cache}, leave it out")
        if target == "portable" and self.scaled:
            raise InputError(
                f"--kv-dtype {self.kv_dtype} needs Sharp's kernels, which --target portable leaves out; choose float16"
            )
        if target != "onnxruntime" and self.quantize:
            engines = "; `sharp build` takes the model without it" if target == "tensorrt" else ""
            raise InputError(
                f"--quantize {self.quantize} uses ONNX Runtime's own op MatMulNBits, which is not standard; "
                f"leave --target {target} out{engines}"
            )
        types = ("float32", "float16") if self.quantize == "int4-128" else ("float32",)
        if self.quantize and self.dtype not in types:
            raise InputError(
                f"--quantize {self.quantize} is for --dtype {' or '.join(types)}; leave --dtype {self.dtype} out"
            )

    def context_of(self, config: SharpConfig, positions: PositionScheme) -> int:
        """Return the number of tokens of the longest context that a server accepts.

        Raises:
            InputError: the model has no positions for that many tokens.
        """
        if self.max_context is None:
            return config.max_context
        if positions == "learned" and self.max_context > config.max_context:
            raise InputError(
                f"--max-context is {self.max_context}, but the model has learned {config.max_context} positions; "
                "give at most that"
            )
        return self.max_context

    @property
    def cache_dtype(self) -> CacheDtype:
        """The type of the paged cache: `kv_dtype`, or else `dtype`."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def scaled(self) -> bool:
        """Whether the paged cache has scales, because its type has 8 bits."""
        return self.kv_dtype in SCALED_CACHES


DEFAULT_GRAPH = GraphOptions()
