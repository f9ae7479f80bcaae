"""Which kernels one call of an op launches, in order: function, types, constants, grid and scratch memory.

The one description that the PyTorch wrapper launches from and the ahead-of-time build compiles from. Everything here
follows from options, shapes and the device's capability, never from what a tensor holds, so that a launch can be
recorded in a CUDA graph.

Arguments have the same name in every kernel: those of the op's inputs, outputs and attributes, `Shapes`, the scratch
buffers, and
    parameters  the width P of head_params
    columns     stats_columns, so many as a row of `stats` has
    t0 ... t7   temperature_coefficients, highest power first, filled up with zeros in front
    most_tokens, units, workers, items  the functions of these names in `launch_sizes.py`
    slots       blocks * block_size, the slots of the caches
    shifted     whether there is a key_shift
    stage       which of a split prompt's launches it is (`split_prefill.py`); `Kernel` has it
An optional input that is absent is a null pointer; `Options` says so, `parameters` of head_params, and no kernel reads
it. `stats` is always written.

Attention is computed by the same kernels, compiled with `Options.contiguous`. For them a batch is sequences of equally
many tokens, and
    key_cache, value_cache      [sequences, kv_heads, slots, head_dim or value_dim]
    query, output, stats        [sequences, q_heads, tokens of a sequence, ...]
    query_start, context_lens   as in PagedAttention; scratch memory that `write_present` fills
    block_table                 [sequences], the number of keys that count; so too
    max_blocks                  so many blocks of 16 as hold `slots` keys
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sharp.plugins.triton.cache_write import write_cache, write_scaled_cache
from sharp.plugins.triton.decode import decode_observe, decode_settled, decode_stream
from sharp.plugins.triton.launch_sizes import (
    MOST_PARTS,
    Grid,
    Shapes,
    can_specialize,
    ceil,
    is_specialized,
    items,
    most_tokens,
    prompt_parts,
    prompts_needed,
    row_blocks,
    units,
)
from sharp.plugins.triton.merge import merge, merge_prompts
from sharp.plugins.triton.options import MOST_SPLITS, Options
from sharp.plugins.triton.prefill import prefill
from sharp.plugins.triton.present import write_present
from sharp.plugins.triton.screen import decode_screen, decode_survivors
from sharp.plugins.triton.screen_write import write_screened_cache
from sharp.plugins.triton.solve import decode_solve
from sharp.plugins.triton.specialized import prefill_full
from sharp.plugins.triton.split_prefill import prefill_count, prefill_observe, prefill_settled
from sharp.plugins.triton.tiles import Tile, decode_tile, prefill_tile

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
CACHE_DTYPES = DTYPES | {"int8": "i8", "fp8": "u8"}
MOST_COEFFICIENTS = 8
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
    prefill_full,
    prefill_observe,
    prefill_settled,
    write_cache,
    write_scaled_cache,
    write_present,
    write_screened_cache,
)
COUNTS = 3  # launches for the steps of a split prompt under entmax; mostly they are enough
SPARSEMAX_COUNTS = 5  # at alpha 2


@dataclass(frozen=True)
class Kernel:
    """One launch. `signature` has every argument in order with its Triton type; the constants are "constexpr" there.

    `stage` is the one argument that differs between launches of a call.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    grid: Callable[[Shapes], Grid]
    needed: Callable[[Shapes], bool] = field(default=lambda shapes: shapes.tokens > 0)
    stage: int = 0

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.function.__name__)

    @property
    def aligned(self) -> tuple[str, ...]:
        """Arguments that point to 16-byte boundaries; compilation relies on it for vector loads."""
        return tuple(name for name, kind in self.signature.items() if kind.startswith("*"))


def kernels(
    options: Options,
    capability: int,
    decode_as: Tile | None = None,
    prefill_as: Tile | None = None,
    specialized: bool = False,
) -> tuple[Kernel, ...]:
    """The launches of one call, in order, for a device of this compute capability (80, 86, 89, 90, 100, 120).

    The tiles are those of `decode_tile` and `prefill_tile` unless others are to be tried. Prompts are `specialized`
    where they can be.
    """
    hash_functions()
    types = _types(options)
    decoding_tile = decode_as or decode_tile(options, capability)
    prompt_tile = prefill_as or prefill_tile(options, capability)
    decode = replace(options, rows=decoding_tile.rows, keys=decoding_tile.keys, spread=True)
    prompt = replace(options, rows=prompt_tile.rows, keys=prompt_tile.keys)
    specialized = specialized and can_specialize(options, prompt_tile, capability)
    special = replace(prompt, specialized=specialized)

    def kernel(
        function: Any,
        arguments: str,
        grid: Callable[[Shapes], Grid],
        constants: dict[str, Any],
        warps: int = 4,
        stages: int = 2,
        **rest: Any,
    ) -> Kernel:
        signature = {name: types[name] for name in arguments.split()} | dict.fromkeys(constants, "constexpr")
        return Kernel(function, signature, constants, warps, stages, grid, **rest)

    def by_item(shapes: Shapes) -> Grid:
        return items(decode, shapes), shapes.kv_heads * row_blocks(decode, shapes), 1

    def decoding_needed(shapes: Shapes) -> bool:
        equally_long = options.contiguous or shapes.sequences == 1
        return shapes.tokens > 0 and not (equally_long and prompts_needed(options, shapes))

    def by_split(function: Any, arguments: str, constants: dict[str, Any] | None = None) -> Kernel:
        constants = (constants or {}) | {"OPTIONS": decode}
        warps, stages = decoding_tile.warps, decoding_tile.stages
        return kernel(function, arguments, by_item, constants, warps, stages, needed=decoding_needed)

    def by_row(shapes: Shapes) -> Grid:
        return units(shapes) * max(1, most_tokens(shapes)), shapes.q_heads, 1

    def tiles_of_prompts(shapes: Shapes) -> Grid:
        tiles = shapes.tokens * shapes.group // prompt.rows + shapes.sequences
        return tiles, shapes.kv_heads, prompt_parts(prompt, shapes)

    tile = {"OPTIONS": decode}
    if options.contiguous:
        store = kernel(
            write_present,
            "key value key_cache value_cache past_lens total_lens query_start context_lens block_table plan"
            " tokens sequences kv_heads slots new_keys past counted stored"
            " max_blocks most_tokens units workers items window causal",
            lambda shapes: (max(1, ceil(shapes.new_keys, decode.rows)) + 1, shapes.kv_heads, shapes.sequences),
            tile,
            needed=lambda shapes: shapes.sequences > 0,
        )
    elif options.quantized:
        store = kernel(
            write_scaled_cache,
            "key value key_cache value_cache key_scale value_scale slot_mapping query_start context_lens output stats"
            " plan tokens sequences q_heads kv_heads slots max_blocks most_tokens units workers items columns"
            " window causal",
            lambda shapes: (shapes.tokens + 1, shapes.kv_heads, 1),
            tile,
        )
    elif options.screened:
        store = kernel(
            write_screened_cache,
            "key value key_cache value_cache key_screen key_shift slot_mapping query_start context_lens output stats"
            " plan tokens sequences q_heads kv_heads slots max_blocks most_tokens units workers items shifted columns"
            " window causal",
            lambda shapes: (ceil(shapes.tokens, decode.rows) + 1, shapes.kv_heads, 1),
            tile,
        )
    else:
        store = kernel(
            write_cache,
            "key value key_cache value_cache slot_mapping query_start context_lens output stats"
            " plan tokens sequences q_heads kv_heads slots max_blocks most_tokens units workers items columns"
            " window causal",
            lambda shapes: (ceil(shapes.tokens, decode.rows) + 1, shapes.kv_heads, 1),
            tile,
        )
    decoding: tuple[Kernel, ...]
    observing: tuple[Kernel, ...] = ()
    if options.screened:
        observing = (
            by_split(
                decode_screen,
                "query key_screen key_shift block_table query_start context_lens alibi_slopes collect_stats plan sums"
                " logits sequences q_heads kv_heads max_blocks slots most_tokens units shifted window causal scale"
                " softcap",
            ),
            by_split(
                decode_survivors,
                "query key_cache key_screen key_shift block_table query_start context_lens head_params alibi_slopes"
                " collect_stats plan sums logits sequences q_heads kv_heads max_blocks slots most_tokens units"
                " parameters shifted window causal scale softcap alpha",
                {"MOST_SPLITS": MOST_SPLITS},
            ),
        )
    elif options.solves:
        observing = (
            by_split(
                decode_observe,
                "query key_cache key_scale block_table query_start context_lens alibi_slopes collect_stats plan sums"
                " logits sequences q_heads kv_heads max_blocks slots most_tokens units window causal scale softcap",
            ),
        )
    if options.solves:
        decoding = (
            *observing,
            kernel(
                decode_solve,
                "block_table query_start context_lens head_params plan sums logits solution sequences q_heads"
                " max_blocks most_tokens parameters window causal alpha entropy_threshold t0 t1 t2 t3 t4 t5 t6 t7",
                by_row,
                {"MOST_SPLITS": MOST_SPLITS, "CHUNK": 4096, "OPTIONS": decode},
                needed=decoding_needed,
                warps=8,
            ),
            by_split(
                decode_settled,
                "value_cache value_scale block_table query_start context_lens collect_stats plan sums logits solution"
                " outputs sequences q_heads kv_heads max_blocks slots most_tokens units window causal alpha",
            ),
        )
    else:
        decoding = (
            by_split(
                decode_stream,
                "query key_cache value_cache key_scale value_scale block_table query_start context_lens head_params"
                " alibi_slopes collect_stats plan sums outputs sequences q_heads kv_heads max_blocks slots"
                " most_tokens units parameters window causal scale softcap",
            ),
        )
    merging = kernel(
        merge,
        "block_table query_start context_lens head_params plan sums outputs solution collect_stats output stats"
        " sequences q_heads max_blocks most_tokens parameters columns window causal",
        by_row,
        {"MOST_SPLITS": MOST_SPLITS, "OPTIONS": decode},
        needed=decoding_needed,
    )

    def whole_tiles(shapes: Shapes) -> Grid:
        return *tiles_of_prompts(shapes)[:2], 1

    def split(shapes: Shapes) -> bool:
        return prompt_parts(prompt, shapes) > 1

    def of_prompts(
        function: Any,
        arguments: str,
        constants: dict[str, Any] | None = None,
        grid: Callable[[Shapes], Grid] = tiles_of_prompts,
        **rest: Any,
    ) -> Kernel:
        return kernel(
            function,
            arguments,
            grid,
            {"OPTIONS": prompt} | (constants or {}),
            warps=prompt_tile.warps,
            stages=prompt_tile.stages,
            **rest,
        )

    def of_all_tiles(prompt: Options) -> Kernel:
        return of_prompts(
            prefill,
            "query key_cache value_cache key_scale value_scale block_table query_start context_lens head_params"
            " alibi_slopes collect_stats output stats sums outputs tiles"
            " sequences q_heads kv_heads max_blocks slots most_tokens parts parameters columns window causal"
            " scale softcap alpha entropy_threshold t0 t1 t2 t3 t4 t5 t6 t7",
            {"OPTIONS": prompt},
            needed=lambda shapes: (
                prompts_needed(options, shapes)
                and not (options.solves and split(shapes))
                and prompt.specialized == is_specialized(special, shapes)
            ),
        )

    prompts: tuple[Kernel, ...] = (of_all_tiles(prompt),)
    if specialized:
        full = kernel(
            prefill_full,
            "query key_cache value_cache block_table query_start context_lens head_params collect_stats sums outputs"
            " tokens sequences q_heads kv_heads max_blocks slots most_tokens parameters window causal scale",
            lambda shapes: (shapes.tokens // prompt.rows + shapes.sequences, shapes.q_heads, 1),
            {"OPTIONS": special},
            needed=lambda shapes: prompts_needed(options, shapes) and is_specialized(special, shapes),
        )
        prompts = (full, of_all_tiles(special), *prompts)
    passes: list[Kernel] = []
    if options.solves:
        passes.append(
            of_prompts(
                prefill_observe,
                "query key_cache key_scale block_table query_start context_lens alibi_slopes collect_stats sums tiles"
                " tokens sequences q_heads kv_heads max_blocks slots most_tokens parts stage window causal"
                " scale softcap alpha",
                needed=split,
            )
        )
        steps = 0
        if options.normalizer == "entmax":  # the last one is for tiles that have not settled by then
            steps = 1 + (SPARSEMAX_COUNTS if options.power == "one" else COUNTS)
        passes += [
            of_prompts(
                prefill_count,
                "query key_cache key_scale block_table query_start context_lens head_params alibi_slopes sums tiles"
                " tokens sequences q_heads kv_heads max_blocks slots most_tokens parts stage parameters window causal"
                " scale softcap alpha",
                {"MOST_PARTS": MOST_PARTS},
                needed=split,
                stage=stage,
                grid=tiles_of_prompts if stage < steps else whole_tiles,
            )
            for stage in range(1, steps + 1)
        ]
        passes.append(
            of_prompts(
                prefill_settled,
                "query key_cache value_cache key_scale value_scale block_table query_start context_lens head_params"
                " alibi_slopes collect_stats sums outputs tiles tokens sequences q_heads kv_heads max_blocks slots"
                " most_tokens parts stage parameters window causal scale softcap alpha entropy_threshold"
                " t0 t1 t2 t3 t4 t5 t6 t7",
                {"MOST_PARTS": MOST_PARTS},
                needed=split,
                stage=len(passes),
            )
        )
    merging_prompts = kernel(
        merge_prompts,
        "query_start head_params sums outputs collect_stats output stats sequences q_heads most_tokens parts"
        " stage parameters columns",
        lambda shapes: (shapes.tokens, shapes.q_heads, 1),
        {"MOST_PARTS": MOST_PARTS, "OPTIONS": decode},
        needed=split,
        stage=max(0, len(passes) - 1),
    )
    return store, *decoding, merging, *prompts, *passes, merging_prompts


def prompt_options(launches: Sequence[Kernel]) -> Options:
    """Those of the kernel `prefill` among them, with the size of its tiles."""
    options: Options = next(kernel.constants["OPTIONS"] for kernel in launches if kernel.function is prefill)
    return options


@cache
def hash_functions() -> None:
    """Triton's hash of a function differs with which functions were hashed before it.

    All are hashed in one order here, so that every process finds in the cache what another one compiled.
    """
    for function in FUNCTIONS:
        getattr(function, "cache_key", None)  # computed once, when first read; the interpreter's functions have none


def _types(options: Options) -> dict[str, str]:
    data, cache = f"*{DTYPES[options.dtype]}", f"*{CACHE_DTYPES[options.cache_dtype]}"
    kinds = (
        (data, "query key value output"),
        (cache, "key_cache value_cache"),
        ("*i32", "key_screen slot_mapping block_table query_start context_lens past_lens total_lens plan tiles"),
        ("*fp32", "key_scale value_scale key_shift head_params alibi_slopes stats sums outputs logits solution"),
        ("*u1", "collect_stats"),
        ("i32", "tokens sequences max_blocks slots most_tokens q_heads kv_heads parts stage parameters"),
        ("i32", "units workers items shifted window causal"),
        ("i32", "new_keys past counted stored columns"),
        ("fp32", "scale softcap alpha entropy_threshold t0 t1 t2 t3 t4 t5 t6 t7"),
    )
    types: dict[str, str] = {}
    for kind, names in kinds:
        types.update(dict.fromkeys(names.split(), kind))
    return types


def compile_kernel(kernel: Kernel, capability: int) -> Any:
    """Triton's compiled kernel for a device of this compute capability, which need not be there.

    It is the one that the wrapper's launch would compile, down to the key in Triton's cache.
    """
    facts = {"*": [["tt.divisibility", 16]]}
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        facts["constexpr"] = []  # newer launches name the constants among the attributes, without any
    attributes = {
        (index,): facts[kind if kind == "constexpr" else "*"]
        for index, (name, kind) in enumerate(kernel.signature.items())
        if name in kernel.aligned or (kind == "constexpr" and kind in facts)
    }
    source = ASTSource(kernel.function, kernel.signature, kernel.constants, attributes)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
