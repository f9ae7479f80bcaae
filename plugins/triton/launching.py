"""The options, arguments and launches of a call, shared by the wrappers of both ops for PyTorch."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from sharp.core.errors import InputError
from sharp.plugins.op.attributes import (
    NORMALIZERS,
    SCALED_CACHES,
    Attributes,
    check_attributes,
    head_params_mistake,
)
from sharp.plugins.op.definition import MOST_COEFFICIENTS, OpDefinition
from sharp.plugins.op.key_screen import screen_bytes
from sharp.plugins.triton.launch_plan import Grid, LaunchPlan, Shapes, plan_launches
from sharp.plugins.triton.options import Options, power_name
from sharp.plugins.triton.variants import CACHE_DTYPES, DTYPES, FLOAT_ARGUMENTS, INTEGER_ARGUMENTS, Kernel, kernels

INTEGERS = ("plan", "tiles")  # scratch buffers of int32; the others are float32
# Types of absent inputs; float32 for all others.
ABSENT_TYPES = {"tensor(int32)": torch.int32, "tensor(bool)": torch.bool}

INTERPRETED = (90, 4)  # capability and multiprocessors assumed for Triton's interpreter, which has no device


def options_of(
    attributes: Attributes,
    query: Tensor,
    value: Tensor,
    keys: Tensor,
    optional: Mapping[str, Tensor | None],
    block_size: int,
    *,
    contiguous: bool,
) -> Options:
    """Check a call and return its compile-time options, with the default tile (`variants.kernels` chooses it).

    `keys` is the key cache, or contiguous keys. `optional` has the op's optional inputs by name, which decide by their
    presence and shape.

    Raises:
        InputError: the kernels do not support the normalizer, a dtype or a size.
    """
    if attributes.normalizer not in NORMALIZERS:
        raise InputError(f"normalizer is {attributes.normalizer!r}; it must be one of {', '.join(NORMALIZERS)}")
    check_attributes(asdict(attributes), gpu=True)
    dtype, cache_dtype = type_name(query), type_name(keys)
    for name, kind, known in (("query", dtype, DTYPES), ("key_cache", cache_dtype, CACHE_DTYPES)):
        if kind not in known:
            raise InputError(f"{name} is {kind}; the Triton kernels take {', '.join(known)}")
    if cache_dtype not in (dtype, *SCALED_CACHES) and dtype != "float32":
        raise InputError(f"query is {dtype} and the cache {cache_dtype}; it must be of that type, int8 or fp8")
    if block_size < 16 or block_size & (block_size - 1):
        raise InputError(f"the block size is {block_size}; the Triton kernels need a power of two of at least 16")
    head_params, screened = optional["head_params"], optional.get("key_screen") is not None
    if screened and (attributes.normalizer != "entmax" or cache_dtype in SCALED_CACHES):
        raise InputError("key_screen is given; only entmax over a cache of floats has one: leave it out")
    mistake = head_params_mistake(attributes.normalizer, None if head_params is None else head_params.shape[1])
    if mistake is not None:
        raise InputError(mistake)
    return Options(
        attributes.normalizer,
        dtype,
        cache_dtype,
        query.shape[-1],
        value.shape[-1],
        block_size,
        statistics=optional["collect_stats"] is not None,
        alibi=optional["alibi_slopes"] is not None,
        softcap=attributes.softcap > 0,
        contiguous=contiguous,
        power=power_name(attributes.alpha) if attributes.normalizer == "entmax" else "",
        screened=screened,
    )


def arguments_of(
    op: OpDefinition, attributes: Attributes, inputs: Mapping[str, Tensor | None], output: Tensor, stats: Tensor
) -> dict[str, Any]:
    """Return the arguments of the kernels, by name, for attributes, inputs and outputs of a call.

    The names are those of the op, except `columns` for stats_columns, and t0 to t7 for the temperature coefficients,
    highest power first, filled up with zeros in front. An absent input is never read; it becomes a tensor of its type,
    because a null pointer would compile another variant.
    """
    missing = MOST_COEFFICIENTS - len(attributes.coefficients)
    polynomial = (0.0,) * missing + attributes.coefficients
    arguments: dict[str, Any] = {
        **{name: float(getattr(attributes, name)) for name in FLOAT_ARGUMENTS},
        **{name: int(getattr(attributes, name)) for name in INTEGER_ARGUMENTS},
        "columns": attributes.stats_columns,
        **{f"t{index}": number for index, number in enumerate(polynomial)},
        "output": output,
        "stats": stats,
    }
    for parameter in op.all_inputs:
        tensor = inputs.get(parameter.name)
        if tensor is None and parameter.type in ABSENT_TYPES:
            tensor = stats.new_empty(1, dtype=ABSENT_TYPES[parameter.type])
        arguments[parameter.name] = stats if tensor is None else tensor
    head_params = inputs["head_params"]
    return arguments | {"parameters": 0 if head_params is None else head_params.shape[1]}


def type_name(tensor: Tensor) -> str:
    """Return the name that `Options` uses for the type of a tensor: "float16", "int8", or "fp8" for float8_e4m3fn."""
    return "fp8" if tensor.dtype == torch.float8_e4m3fn else str(tensor.dtype).removeprefix("torch.")


def check_shapes(op: OpDefinition, inputs: Mapping[str, Tensor | None]) -> dict[str, int]:
    """Return the sizes of a call, by their symbols in the op's definition; absent inputs are None or left out.

    Raises:
        InputError: shapes do not agree, so kernels would read and write out of bounds.
    """
    sizes: dict[str, int] = {}
    for parameter in op.all_inputs:
        tensor = inputs.get(parameter.name)
        if tensor is None or parameter.shape is None:
            continue
        if tensor.dim() == len(parameter.shape):
            for symbol, size in zip(parameter.shape, tensor.shape, strict=True):
                sizes.setdefault(symbol, size)
        if parameter.name == "key_screen":
            sizes["screen_bytes"] = screen_bytes(sizes["head_dim"], sizes["block_size"])
        if "sequences" in sizes:
            sizes["sequences + 1"] = sizes["sequences"] + 1
        expected = [sizes.get(symbol, symbol) for symbol in parameter.shape]
        if list(tensor.shape) != expected:
            needed = ", ".join(map(str, expected))
            raise InputError(f"{parameter.name} has shape {list(tensor.shape)}; it must be [{needed}]")
    q_heads, kv_heads = sizes["q_heads"], sizes["kv_heads"]
    if not kv_heads or q_heads % kv_heads:
        raise InputError(f"query has {q_heads} heads and key {kv_heads}; the first must be a multiple of the second")
    return sizes


def run_kernels(options: Options, shapes: Shapes, device: torch.device, given: dict[str, Any]) -> None:
    """Launch the kernels of a call in order, on PyTorch's current stream, without waiting for them.

    `given` are all arguments of the kernels by name, except the sizes in `shapes` and scratch memory, which is
    allocated here.

    Raises:
        InputError: a tensor is not contiguous, or on the CPU without Triton's interpreter.
        SharpError: the native library, which plans the launches, is not built.
    """
    for name, argument in given.items():
        if isinstance(argument, Tensor) and not argument.is_contiguous():
            raise InputError(f"{name} is not contiguous; the kernels read and write whole tensors: give a copy")
    found = {kernel.name: kernel for kernel in _kernels(options, device_of(device)[0])}
    plan = plan_of(options, shapes, found)
    arguments = given | {
        "tokens": shapes.tokens,
        "sequences": shapes.sequences,
        "max_blocks": shapes.max_blocks,
        "q_heads": shapes.q_heads,
        "kv_heads": shapes.kv_heads,
        "most_tokens": plan.most_tokens,
        "units": plan.units,
        "workers": plan.workers,
        "items": plan.items,
        "parts": plan.parts,
        **{
            name: torch.empty(size, dtype=torch.int32 if name in INTEGERS else torch.float32, device=device)
            for name, size in plan.scratch.items()
        },
    }
    for step in plan.launches:
        launch(found[step.function], step.grid, arguments | {"stage": step.stage})


def plan_of(options: Options, shapes: Shapes, found: Mapping[str, Kernel]) -> LaunchPlan:
    """Return the plan of a call with the kernels `found`, by name, whose tiles determine grids.

    Raises:
        SharpError: the native library is missing, or a size is not positive.
    """
    decode, prompt = (found[name].constants["OPTIONS"] for name in ("merge", "prefill"))
    return plan_launches(options, shapes, decode.rows, prompt.rows, prompt.keys)


def launch(kernel: Kernel, grid: Grid, arguments: dict[str, Any]) -> None:
    """Start one kernel on the current stream.

    `arguments` are values by parameter name; there may be more than the kernel has, and "query" must be among them.

    Raises:
        InputError: the tensors are on the CPU, where only Triton's interpreter can run the kernels.
    """
    if arguments["query"].device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise InputError(
            "query is on the CPU; the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 to try them"
        )
    given = {name: arguments[name] for name, kind in kernel.signature.items() if kind != "constexpr"}
    kernel.function[grid](**given, **kernel.constants, num_warps=kernel.warps, num_stages=kernel.stages)


@lru_cache(maxsize=256)
def _kernels(options: Options, capability: int) -> tuple[Kernel, ...]:
    return kernels(options, capability)


@cache
def device_of(device: torch.device) -> tuple[int, int]:
    """Return compute capability (90 is 9.0) and number of multiprocessors of a device; `INTERPRETED` for the CPU."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count
