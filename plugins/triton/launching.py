"""What the ops' wrappers for PyTorch share: options, arguments and launches."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from sharp.plugins.errors import InputError
from sharp.plugins.ops.attributes import (
    DEFAULT_ALPHA,
    DEFAULT_ENTROPY_THRESHOLD,
    DEFAULT_STATS_COLUMNS,
    ICML2025_COEFFICIENTS,
    NORMALIZERS,
    SCALED_CACHES,
    check_stats_columns,
    head_params_mistake,
)
from sharp.plugins.triton.launch_sizes import Shapes, items, most_tokens, prompt_parts, scratch, units, workers
from sharp.plugins.triton.options import Options, power_name
from sharp.plugins.triton.variants import CACHE_DTYPES, DTYPES, MOST_COEFFICIENTS, Kernel, kernels, prompt_options

MOST_ALPHA = 4.0  # of entmax: weights next to the threshold are roots of order alpha - 1 of differences in float32
INTEGERS = ("plan", "tiles")  # scratch memory of these

SPECIALIZED = os.environ.get("SHARP_SPECIALIZED_PROMPTS") == "1"  # `specialized.py`, until a GPU has timed it
INTERPRETED = (90, 4)  # capability and multiprocessors that Triton's interpreter, which has no device, stands for


@dataclass(frozen=True)
class Attributes:
    """The op's attributes, as in `sharp.plugins.ops.schema`."""

    normalizer: str
    scale: float
    alpha: float = DEFAULT_ALPHA
    temperature_coefficients: Sequence[float] = ICML2025_COEFFICIENTS
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD
    softcap: float = 0.0
    window: int = -1
    causal: bool = True
    stats_columns: int = DEFAULT_STATS_COLUMNS

    def options(
        self,
        query: Tensor,
        value: Tensor,
        cache: Tensor,
        *,
        block_size: int,
        contiguous: bool,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        collect_stats: Tensor | None,
        screened: bool = False,
    ) -> Options:
        """The compile-time options of a call, checked.

        Raises:
            InputError: the kernels lack the normalizer, a dtype or a size.
        """
        if self.normalizer not in NORMALIZERS:
            raise InputError(f"normalizer is {self.normalizer!r}; it must be one of {', '.join(NORMALIZERS)}")
        dtype, cache_dtype = type_name(query), type_name(cache)
        for name, kind, known in (("query", dtype, DTYPES), ("key_cache", cache_dtype, CACHE_DTYPES)):
            if kind not in known:
                raise InputError(f"{name} is {kind}; the Triton kernels take {', '.join(known)}")
        if cache_dtype not in (dtype, *SCALED_CACHES) and dtype != "float32":
            raise InputError(f"query is {dtype} and the cache {cache_dtype}; it must be of that type, int8 or fp8")
        if block_size < 16 or block_size & (block_size - 1):
            raise InputError(f"the block size is {block_size}; the Triton kernels need a power of two of at least 16")
        check_stats_columns(self.stats_columns)
        if not 0 < self.scale < float("inf"):
            raise InputError(f"scale is {self.scale}; the Triton kernels need a positive number")
        if self.normalizer == "entmax" and not self.alpha > 1:
            raise InputError(f"alpha is {self.alpha}; entmax needs alpha > 1")
        if self.normalizer == "entmax" and self.alpha > MOST_ALPHA:
            raise InputError(f"alpha is {self.alpha}; entmax on a GPU takes an alpha of at most {MOST_ALPHA:g}")
        if screened and (self.normalizer != "entmax" or cache_dtype in SCALED_CACHES):
            raise InputError("key_screen is given; only entmax over a cache of floats has one: leave it out")
        if head_params is not None and head_params.dim() != 2:
            raise InputError(f"head_params has {head_params.dim()} dimensions, but must have 2: heads and parameters")
        mistake = head_params_mistake(self.normalizer, None if head_params is None else head_params.shape[1])
        if mistake is not None:
            raise InputError(mistake)
        if len(self.temperature_coefficients) > MOST_COEFFICIENTS:
            count = len(self.temperature_coefficients)
            raise InputError(f"temperature_coefficients has {count} numbers; the kernels take {MOST_COEFFICIENTS}")
        return Options(
            self.normalizer,
            dtype,
            cache_dtype,
            query.shape[-1],
            value.shape[-1],
            block_size,
            statistics=collect_stats is not None,
            alibi=alibi_slopes is not None,
            softcap=self.softcap > 0,
            contiguous=contiguous,
            power=power_name(self.alpha) if self.normalizer == "entmax" else "",
            screened=screened,
        )

    def arguments(self) -> dict[str, Any]:
        """The attributes as kernels take them."""
        missing = MOST_COEFFICIENTS - len(self.temperature_coefficients)
        polynomial = (0.0,) * missing + tuple(self.temperature_coefficients)
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "window": self.window,
            "causal": int(self.causal),
            "columns": self.stats_columns,
            "alpha": self.alpha,
            "entropy_threshold": self.entropy_threshold,
            **{f"t{index}": number for index, number in enumerate(polynomial)},
        }


def type_name(tensor: Tensor) -> str:
    """What `Options` calls the type of a tensor's numbers."""
    return "fp8" if tensor.dtype == torch.float8_e4m3fn else str(tensor.dtype).removeprefix("torch.")


def check_shapes(**expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raises InputError for the first tensor of another shape: the kernels would read and write beside it."""
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")


def run_kernels(options: Options, shapes: Shapes, device: torch.device, given: dict[str, Any]) -> None:
    """Launch what a call needs, in order; `given` are all arguments but sizes and scratch memory.

    Raises:
        InputError: a tensor is not contiguous, or on the CPU without Triton's interpreter.
    """
    for name, argument in given.items():
        if isinstance(argument, Tensor) and not argument.is_contiguous():
            raise InputError(f"{name} is not contiguous; the kernels read and write whole tensors: give a copy")
    launches = _kernels(options, device_of(device)[0], SPECIALIZED)
    prompt = prompt_options(launches)
    buffers = scratch(options, shapes, prompt)
    arguments = given | {
        "tokens": shapes.tokens,
        "sequences": shapes.sequences,
        "max_blocks": shapes.max_blocks,
        "q_heads": shapes.q_heads,
        "kv_heads": shapes.kv_heads,
        "most_tokens": most_tokens(shapes),
        "units": units(shapes),
        "workers": workers(options, shapes),
        "items": items(options, shapes),
        "parts": prompt_parts(prompt, shapes),
        **{
            name: torch.empty(size, dtype=torch.int32 if name in INTEGERS else torch.float32, device=device)
            for name, size in buffers.items()
        },
    }
    for kernel in launches:
        if kernel.needed(shapes):
            launch(kernel, shapes, arguments)


def launch(kernel: Kernel, shapes: Shapes, arguments: dict[str, Any]) -> None:
    """Start one kernel on the current stream.

    Raises:
        InputError: the tensors are on the CPU, where only Triton's interpreter can run the kernels.
    """
    if arguments["query"].device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise InputError(
            "query is on the CPU; the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 to try them"
        )
    if kernel.constants["OPTIONS"].specialized:  # has descriptors; a program may have an allocator of its own
        triton.set_allocator(_allocate)
    arguments = arguments | {"stage": kernel.stage}
    given = {name: arguments[name] for name, kind in kernel.signature.items() if kind != "constexpr"}
    kernel.function[kernel.grid(shapes)](**given, **kernel.constants, num_warps=kernel.warps, num_stages=kernel.stages)


@lru_cache(maxsize=256)
def _kernels(options: Options, capability: int, specialized: bool) -> tuple[Kernel, ...]:
    return kernels(options, capability, specialized=specialized)


def _allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
    """Memory for tensor descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


@cache
def device_of(device: torch.device) -> tuple[int, int]:
    """Compute capability (90 is 9.0) and number of multiprocessors."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count
