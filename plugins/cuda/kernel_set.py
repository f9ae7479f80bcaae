"""Which kernels `make kernels` compiles, and their names, which the C++ side puts together in the same way."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

from sharp.plugins.cuda.compiler import Kernel
from sharp.plugins.ops.attributes import SCALED_CACHES
from sharp.plugins.triton import launch_sizes, sampling, tiles, variants
from sharp.plugins.triton.options import LISTED_KEYS, MOST_SPLITS, SPLIT_KEYS, Options

BLOCK_SIZE = 16  # what the exporter writes unless told otherwise, and what SharpAttention's keys are counted in
POWERS = ("one", "two", "any")  # of entmax: alpha 2, 1.5 and all others

# What each kernel's code depends on beside types and sizes. Options that make no difference are not in the name, and
# have the values of the first call that needs the kernel. Kernels have loops with statistics and without: a flag on the
# device says which.
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
    """The options of every call that the library is to serve, of entmax also with a key screen.

    A type is of queries and cache alike, or of both as in float32/float16. A feature is plain, alibi, softcap or
    alibi+softcap.
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
        if op != "SharpAttention" or "/" not in dtype  # whose keys are of the query's type
        for power in (POWERS if normalizer == "entmax" else ("",))
        for screened in (False, True)
        if not screened
        or (
            normalizer == "entmax"
            and op == "PagedAttention"
            and not dtype.endswith(tuple(f"/{scaled}" for scaled in SCALED_CACHES))
        )
    ]


def kernels_for(options: Iterable[Options], capability: int) -> list[Kernel]:
    """Every kernel that calls with these options launch on a GPU of this capability, each once.

    With those of PagedAttention comes the one that samples.
    """
    options, kernels = list(options), dict[str, Kernel]()
    for option in options:
        for variant in variants.kernels(option, capability):
            name = kernel_name(variant.name, option)
            kernels.setdefault(name, _kernel(name, variant))
    if not all(option.contiguous for option in options):
        kernels[SAMPLING] = sampling_kernel()
    return list(kernels.values())


def sampling_kernel() -> Kernel:
    """The kernel that samples tokens, the same for every model."""
    return Kernel(SAMPLING, sampling.sample_rows, sampling.ARGUMENTS, sampling.CONSTANTS, warps=sampling.WARPS)


def kernel_name(function: str, options: Options) -> str:
    """For example `prefill float16 float16 64 64 16 entmax two alibi`: function, types and sizes, fields."""
    values = [getattr(options, field) for field in SIZES.split()]
    for field in ("contiguous", *FIELDS[function].split()):
        value = getattr(options, field)
        values.append(field * value if isinstance(value, bool) else value)
    return " ".join([function, *(str(value) for value in values if value != "")])


def plan_constants() -> Mapping[str, int]:
    """The numbers that grids and scratch memory follow from, for C++."""
    return {
        "kDecodeWaves": launch_sizes.DECODE_WAVES,
        "kSplitKeys": SPLIT_KEYS,
        "kMostSplits": MOST_SPLITS,
        "kMostTokens": launch_sizes.MOST_TOKENS,
        "kMostRows": launch_sizes.MOST_ROWS,
        "kMostParts": launch_sizes.MOST_PARTS,
        "kPartKeys": launch_sizes.PART_KEYS,
        "kMostPromptRows": tiles.MOST_PROMPT_ROWS,
        "kListedKeys": LISTED_KEYS,
        "kEntmaxCounts": variants.COUNTS,
        "kSparsemaxCounts": variants.SPARSEMAX_COUNTS,
        "kSources": _sources(),
    }


def _sources() -> int:
    """A hash of the kernels' sources, 36 bits."""
    folder = Path(variants.__file__).parent
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return int(hashlib.sha256(content).hexdigest()[:9], 16)


def _kernel(name: str, variant: variants.Kernel) -> Kernel:
    return Kernel(
        name=name,
        function=variant.function,
        arguments={name: kind for name, kind in variant.signature.items() if kind != "constexpr"},
        constants=variant.constants,
        warps=variant.warps,
        stages=variant.stages,
        tile=(variant.constants["OPTIONS"].rows, variant.constants["OPTIONS"].keys),
    )
