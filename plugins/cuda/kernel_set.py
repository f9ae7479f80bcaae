"""The set of kernels that `make kernels` compiles, and their names, which C++ composes in the same way."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

from sharp.plugins.cuda.compiler import SpecializedKernel
from sharp.plugins.op import definition
from sharp.plugins.op.definition import SCALED_CACHES
from sharp.plugins.triton import launch_plan, sampling, variants
from sharp.plugins.triton.options import Options

BLOCK_SIZE = 16  # the exporter's default, and the size of the blocks in which SharpAttention's keys are counted
POWERS = ("one", "two", "any")  # entmax with alpha 2, 1.5 and any other

# The options, besides types and sizes, that each kernel's code depends on. Options that make no difference are not in
# the name; the kernel is compiled with the values of the first call that needs it. Every kernel has loops with and
# without statistics, and a flag on the device selects the loop.
FIELDS = {
    "write_cache": "",
    "write_scaled_cache": "",
    "write_present": "",
    "write_screened_cache": "",
    "decode_stream": "normalizer alibi softcap",
    "decode_observe": "normalizer alibi softcap",
    "decode_screen": "normalizer alibi softcap",
    "decode_survivors": "normalizer alibi softcap",
    "decode_solve": "normalizer power",
    "decode_settled": "normalizer power",
    "merge": "normalizer",
    "merge_prompts": "normalizer",
    "prefill": "normalizer power alibi softcap",
    "prefill_count": "normalizer power alibi softcap",
    "prefill_observe": "normalizer power alibi softcap",
    "prefill_settled": "normalizer power alibi softcap",
}
SAMPLING = "sample_rows"
SIZES = "dtype cache_dtype head_dim value_dim block_size"


def options_for(
    normalizers: Iterable[str],
    head_dims: Iterable[int],
    dtypes: Iterable[str],
    features: Iterable[str],
    op: str = "PagedAttention",
    block_sizes: Iterable[int] = (BLOCK_SIZE,),
) -> list[Options]:
    """Return the options of every call that the library must support: all combinations of the arguments.

    Entmax is included for all three powers, with and without a key screen. A dtype is that of queries and cache, or
    names both as in float32/float16; SharpAttention takes only the former. A feature is plain, alibi, softcap or
    alibi+softcap. `op` is PagedAttention or SharpAttention, which ignores `block_sizes`. A head dim is that of keys and
    values.
    """
    return [
        Options(
            normalizer,
            dtype.partition("/")[0],
            dtype.rpartition("/")[2],
            head_dim,
            head_dim,
            block_size,
            statistics=True,
            alibi="alibi" in feature.split("+"),
            softcap="softcap" in feature.split("+"),
            contiguous=op == "SharpAttention",
            power=power,
            screened=screened,
        )
        for normalizer, head_dim, dtype, block_size, feature in product(
            normalizers, head_dims, dtypes, block_sizes if op == "PagedAttention" else (BLOCK_SIZE,), features
        )
        if op != "SharpAttention" or "/" not in dtype  # keys of SharpAttention have the query's type
        for power in (POWERS if normalizer == "entmax" else ("",))
        for screened in (False, True)
        if not screened
        or (
            normalizer == "entmax"
            and op == "PagedAttention"
            and not dtype.endswith(tuple(f"/{scaled}" for scaled in SCALED_CACHES))
        )
    ]


def kernels_for(options: Iterable[Options], capability: int) -> list[SpecializedKernel]:
    """Return every kernel that calls with these options launch on a GPU of this compute capability (90 is 9.0), once.

    If there are options of PagedAttention, the kernel that samples tokens is included.
    """
    options, kernels = list(options), dict[str, SpecializedKernel]()
    for option in options:
        for variant in variants.kernels(option, capability):
            name = kernel_name(variant.name, option)
            kernels.setdefault(name, _kernel(name, variant))
    if not all(option.contiguous for option in options):
        kernels[SAMPLING] = sampling_kernel()
    return list(kernels.values())


def sampling_kernel() -> SpecializedKernel:
    """Return the kernel that samples tokens, which is the same for every model."""
    return SpecializedKernel(
        SAMPLING, sampling.sample_rows, sampling.ARGUMENTS, sampling.CONSTANTS, warps=sampling.WARPS
    )


def kernel_name(function: str, options: Options) -> str:
    """Return the name of the kernel `function` (a key of `FIELDS`) in a call with these options.

    The name is the function, types and sizes, and the fields that are set, for example: `prefill float16 float16 64 64
    16 entmax two alibi`.
    """
    values = [getattr(options, field) for field in SIZES.split()]
    for field in ("contiguous", *FIELDS[function].split()):
        value = getattr(options, field)
        values.append(field * value if isinstance(value, bool) else value)
    return " ".join([function, *(str(value) for value in values if value != "")])


def plan_constants() -> Mapping[str, int]:
    """Return the constants of the planner by their C++ names ("kMostTokens"), and as "kSources" a hash of all sources.

    The library refuses kernels whose constants differ from its own.
    """
    named = {
        "k" + "".join(map(str.capitalize, name.split("_"))): value
        for name, value in launch_plan.plan_constants().items()
    }
    return named | {"kSources": _sources()}


def _sources() -> int:
    """Return a hash of the kernels' sources, 36 bits."""
    folder = Path(variants.__file__).parent
    paths = [*sorted(folder.glob("*.py")), Path(definition.__file__)]
    content = b"".join(path.read_bytes() for path in paths)
    return int(hashlib.sha256(content).hexdigest()[:9], 16)


def _kernel(name: str, variant: variants.Kernel) -> SpecializedKernel:
    """Return the kernel to compile for a launch variant; compile-time constants are left out of its arguments."""
    return SpecializedKernel(
        name=name,
        function=variant.function,
        arguments={name: kind for name, kind in variant.signature.items() if kind != "constexpr"},
        constants=variant.constants,
        warps=variant.warps,
        stages=variant.stages,
        tile=(variant.constants["OPTIONS"].rows, variant.constants["OPTIONS"].keys),
    )
