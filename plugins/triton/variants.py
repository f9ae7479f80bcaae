"""The kernels of a call of an op: function, types, constants and tile.

The PyTorch wrapper launches kernels from this description and the ahead-of-time build compiles them from it.
`launch_plan.py` computes which kernels a call launches, with what grid and scratch memory.

Arguments have the same name in every kernel: the names of the op's inputs, outputs and attributes, of `Shapes`, of the
scratch buffers, and
    parameters  the width P of head_params
    columns     stats_columns, the width of `stats`
    t0 ... t7   temperature_coefficients, highest power first, filled up with zeros in front
    most_tokens, units, workers, items, parts  as in `LaunchPlan`
    slots       blocks * block_size, the slots of the caches
    shifted     whether there is a key_shift
    stage       the number of a split prompt's launch (`split_prefill.py`), as in `Launch`
An optional input that is absent is a null pointer, which no kernel reads: `Options` tells which inputs are absent, and
`parameters` whether head_params is. `stats` is always written.

SharpAttention is computed by the same kernels, compiled with `Options.contiguous`. A batch is then a set of sequences
with equally many tokens, and
    key_cache, value_cache      [sequences, kv_heads, slots, head_dim or value_dim]
    query, output, stats        [sequences, q_heads, tokens of a sequence, ...]
    query_start, context_lens   as in PagedAttention; scratch memory that `write_present` fills
    block_table                 [sequences], the number of keys that count; scratch memory, too
    max_blocks                  the number of blocks of 16 that hold `slots` keys
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sharp.plugins.op.definition import ATTRIBUTES
from sharp.plugins.triton.cache_write import write_cache, write_scaled_cache
from sharp.plugins.triton.decode import decode_observe, decode_settled, decode_stream
from sharp.plugins.triton.launch_plan import MOST_PARTS
from sharp.plugins.triton.merge import merge, merge_prompts
from sharp.plugins.triton.options import MOST_SPLITS, Options
from sharp.plugins.triton.prefill import prefill
from sharp.plugins.triton.present import write_present
from sharp.plugins.triton.screen import decode_screen, decode_survivors
from sharp.plugins.triton.screen_write import write_screened_cache
from sharp.plugins.triton.solve import decode_solve
from sharp.plugins.triton.split_prefill import prefill_count, prefill_observe, prefill_settled
from sharp.plugins.triton.tiles import Tile, decode_tile, prefill_tile

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
CACHE_DTYPES = DTYPES | {"int8": "i8", "fp8": "u8"}
FLOAT_ARGUMENTS = tuple(argument.name for argument in ATTRIBUTES if argument.native and argument.type == "float")
INTEGER_ARGUMENTS = tuple(argument.name for argument in ATTRIBUTES if argument.native and argument.type == "int")
FUNCTIONS = (
    decode_observe,
    decode_screen,
    decode_settled,
    decode_solve,
    decode_stream,
    decode_survivors,
    merge,
    merge_prompts,
    prefill,
    prefill_count,
    prefill_observe,
    prefill_settled,
    write_cache,
    write_scaled_cache,
    write_present,
    write_screened_cache,
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a call. `signature` maps every argument, in order, to its Triton type; constants are "constexpr".

    `constants` are the values of the constants by name, OPTIONS among them; `stages` is Triton's num_stages.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.function.__name__)

    @property
    def aligned(self) -> tuple[str, ...]:
        """The arguments that point to 16-byte boundaries, on which the compiler relies for vector loads."""
        return tuple(name for name, kind in self.signature.items() if kind.startswith("*"))


# Arguments of several kernels, in the order of their parameters.
_PLACES = "sequences q_heads kv_heads max_blocks slots most_tokens"
_DECODED = f"plan sums logits {_PLACES} units"
_SEEN = "window causal scale softcap"
_POLYNOMIAL = "entropy_threshold t0 t1 t2 t3 t4 t5 t6 t7"
_STORED = (
    "slot_mapping query_start context_lens output stats plan tokens sequences q_heads kv_heads slots max_blocks"
    " most_tokens units workers items"
)
_ROWS = "block_table query_start context_lens"


def kernels(
    options: Options, capability: int, decode_as: Tile | None = None, prefill_as: Tile | None = None
) -> tuple[Kernel, ...]:
    """Return the kernels that calls with these options launch on a device of this compute capability (80, ..., 120).

    `plan_launches` computes which of the kernels one call launches. `decode_as` and `prefill_as` replace the tiles of
    `decode_tile` and `prefill_tile`; `rows`, `keys` and `spread` of `options` are replaced in any case. No kernel is
    compiled here.
    """
    hash_functions()
    decode_tiles = decode_as or decode_tile(options, capability)
    prompt_tiles = prefill_as or prefill_tile(options, capability)
    decode = replace(options, rows=decode_tiles.rows, keys=decode_tiles.keys, spread=True)
    prompt = replace(options, rows=prompt_tiles.rows, keys=prompt_tiles.keys)
    function, arguments = _store(options)
    return (
        _kernel(decode, function, arguments),
        *_decode_kernels(decode, decode_tiles),
        *_prompt_kernels(prompt, prompt_tiles),
        _kernel(
            decode,
            merge_prompts,
            "query_start head_params sums outputs collect_stats output stats sequences q_heads most_tokens parts"
            " stage parameters columns",
            MOST_PARTS=MOST_PARTS,
        ),
    )


def _kernel(
    options: Options, function: Any, arguments: str, warps: int = 4, stages: int = 2, **constants: int
) -> Kernel:
    """Describe a kernel: `arguments` are its arguments in order, `constants` its constants beside OPTIONS."""
    types = _types(options)
    values = {"OPTIONS": options, **constants}
    ordered = {name: values[name] for name in function.arg_names if name in values}
    signature = {name: types[name] for name in arguments.split()} | dict.fromkeys(ordered, "constexpr")
    return Kernel(function, signature, ordered, warps, stages)


def _decode_kernels(options: Options, tile: Tile) -> Iterator[Kernel]:
    """Yield the kernels of decoding, in the order of their launches."""
    kernel = partial(_kernel, options, warps=tile.warps, stages=tile.stages)
    if options.screened:
        yield kernel(
            decode_screen,
            f"query key_screen key_shift {_ROWS} alibi_slopes collect_stats {_DECODED} shifted {_SEEN}",
        )
        yield kernel(
            decode_survivors,
            f"query key_cache key_screen key_shift {_ROWS} head_params alibi_slopes collect_stats {_DECODED}"
            f" parameters shifted {_SEEN} alpha",
            MOST_SPLITS=MOST_SPLITS,
        )
    elif options.solves:
        yield kernel(decode_observe, f"query key_cache key_scale {_ROWS} alibi_slopes collect_stats {_DECODED} {_SEEN}")
    if options.solves:
        yield _kernel(
            options,
            decode_solve,
            f"{_ROWS} head_params plan sums logits solution sequences q_heads max_blocks most_tokens parameters"
            f" window causal alpha {_POLYNOMIAL}",
            warps=8,
            MOST_SPLITS=MOST_SPLITS,
            CHUNK=4096,
        )
        yield kernel(
            decode_settled,
            f"value_cache value_scale {_ROWS} collect_stats plan sums logits solution outputs {_PLACES} units"
            " window causal alpha",
        )
    else:
        yield kernel(
            decode_stream,
            f"query key_cache value_cache key_scale value_scale {_ROWS} head_params alibi_slopes collect_stats"
            f" plan sums outputs {_PLACES} units parameters {_SEEN}",
        )
    yield _kernel(
        options,
        merge,
        f"{_ROWS} head_params plan sums outputs solution collect_stats output stats sequences q_heads max_blocks"
        " most_tokens parameters columns window causal",
        MOST_SPLITS=MOST_SPLITS,
    )


def _prompt_kernels(options: Options, tile: Tile) -> Iterator[Kernel]:
    """Yield the kernels of prompts, in the order of their launches; `merge_prompts` is not among them."""
    kernel = partial(_kernel, options, warps=tile.warps, stages=tile.stages)
    yield kernel(
        prefill,
        f"query key_cache value_cache key_scale value_scale {_ROWS} head_params alibi_slopes collect_stats output"
        f" stats sums outputs tiles {_PLACES} parts parameters columns {_SEEN} alpha {_POLYNOMIAL}",
    )
    if not options.solves:
        return
    yield kernel(
        prefill_observe,
        f"query key_cache key_scale {_ROWS} alibi_slopes collect_stats sums tiles tokens {_PLACES} parts stage"
        f" {_SEEN} alpha",
    )
    if options.normalizer == "entmax":
        yield kernel(
            prefill_count,
            f"query key_cache key_scale {_ROWS} head_params alibi_slopes sums tiles tokens {_PLACES} parts"
            f" stage parameters {_SEEN} alpha",
            MOST_PARTS=MOST_PARTS,
        )
    yield kernel(
        prefill_settled,
        f"query key_cache value_cache key_scale value_scale {_ROWS} head_params alibi_slopes collect_stats sums"
        f" outputs tiles tokens {_PLACES} parts stage parameters {_SEEN} alpha {_POLYNOMIAL}",
        MOST_PARTS=MOST_PARTS,
    )


def _store(options: Options) -> tuple[Any, str]:
    """Return the kernel that stores new keys and values, and its arguments."""
    if options.contiguous:
        return (
            write_present,
            "key value key_cache value_cache past_lens total_lens query_start context_lens block_table plan"
            " tokens sequences kv_heads slots new_keys past counted stored"
            " max_blocks most_tokens units workers items window causal",
        )
    if options.quantized:
        return (
            write_scaled_cache,
            f"key value key_cache value_cache key_scale value_scale {_STORED} columns window causal",
        )
    if options.screened:
        return (
            write_screened_cache,
            f"key value key_cache value_cache key_screen key_shift {_STORED} shifted columns window causal",
        )
    return write_cache, f"key value key_cache value_cache {_STORED} columns window causal"


@cache
def hash_functions() -> None:
    """Hash all functions in one order, so that every process finds in Triton's cache what another one compiled.

    Triton's hash of a function depends on which functions were hashed before it.
    """
    for function in FUNCTIONS:
        getattr(function, "cache_key", None)  # reading it computes the hash once; the interpreter's functions have none


def _types(options: Options) -> dict[str, str]:
    data, cache = f"*{DTYPES[options.dtype]}", f"*{CACHE_DTYPES[options.cache_dtype]}"
    kinds = (
        (data, "query key value output"),
        (cache, "key_cache value_cache"),
        ("*i32", "key_screen slot_mapping block_table query_start context_lens past_lens total_lens plan tiles"),
        ("*fp32", "key_scale value_scale key_shift head_params alibi_slopes stats sums outputs logits solution"),
        ("*u1", "collect_stats"),
        ("i32", "tokens sequences max_blocks slots most_tokens q_heads kv_heads parts stage parameters"),
        ("i32", "units workers items shifted new_keys past counted stored columns"),
        ("i32", " ".join(INTEGER_ARGUMENTS)),
        ("fp32", " ".join(FLOAT_ARGUMENTS)),
        ("fp32", "t0 t1 t2 t3 t4 t5 t6 t7"),
    )
    types: dict[str, str] = {}
    for kind, names in kinds:
        types.update(dict.fromkeys(names.split(), kind))
    return types


def compile_kernel(kernel: Kernel, capability: int) -> Any:
    """Compile a kernel for a device of this compute capability (90 is 9.0), which need not be present.

    Errors are Triton's. The result is the kernel that the wrapper's launch would compile, down to the key in Triton's
    cache.
    """
    facts = {"*": [["tt.divisibility", 16]]}
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        facts["constexpr"] = []  # newer versions list constants among the attributes, with an empty list
    attributes = {
        (index,): facts[kind if kind == "constexpr" else "*"]
        for index, (name, kind) in enumerate(kernel.signature.items())
        if name in kernel.aligned or (kind == "constexpr" and kind in facts)
    }
    source = ASTSource(kernel.function, kernel.signature, kernel.constants, attributes)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
