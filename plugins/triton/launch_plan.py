"""The launches of a call with grids and scratch memory, computed by the planner in C++ (`plugins/cuda/launch_plan.h`).

The planner is compiled into `libsharp_ops.so`, which every installation has, and into `libsharp_cuda.so`.
"""

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache

from sharp.core.errors import SharpError
from sharp.plugins import library_path
from sharp.plugins.op.definition import NORMALIZERS
from sharp.plugins.triton.options import LISTED_KEYS, MOST_SPLITS, SPLIT_KEYS, Options
from sharp.plugins.triton.tiles import MOST_PROMPT_ROWS

DECODE_WAVES = 4  # target of programs per multiprocessor in decoding; more programs share uneven lengths better
MOST_ROWS = 64  # maximum rows of a decoded sequence and a KV head; this many or more are computed by prefill
MOST_TOKENS = 4  # maximum tokens of a decoded sequence; scratch memory grows with it
MOST_PARTS = 16  # maximum parts of the keys of a prompt's tile
PART_KEYS = 4096  # minimum keys of a part, estimated by the width of the block table
COUNTS = 3  # launches for entmax's steps in a split prompt; one more launch goes on if they were not enough
SPARSEMAX_COUNTS = 5  # COUNTS at alpha 2
MOST_LAUNCHES = 24
SCRATCH = ("plan", "sums", "outputs", "logits", "solution", "tiles")

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Shapes:
    """The sizes of a call that determine grids and scratch memory; `max_blocks` is the width of the block table."""

    tokens: int
    sequences: int
    max_blocks: int
    q_heads: int
    kv_heads: int
    multiprocessors: int  # of the device
    new_keys: int = 0  # per sequence; SharpAttention only


@dataclass(frozen=True)
class Launch:
    """A launch of the kernel called `function` with its grid; `stage` numbers the passes over a split prompt."""

    function: str
    grid: Grid
    stage: int


@dataclass(frozen=True)
class LaunchPlan:
    """The launches of a call in order, and the sizes that they share.

    Attributes:
        units: the number of units of decoding: sequences, or tokens if `most_tokens` is 0.
        workers: the number of programs that the keys of all units are split over, for each tile of rows.
        items: the maximum number of splits of the keys of all units.
        parts: the number of parts that the keys of a prompt's tile are split into.
        most_tokens: the maximum number of tokens of a decoded sequence; 0: decoding takes tokens of any sequence.
        scratch: the number of 32-bit words in each scratch buffer, by name.
        largest: the number of 32-bit words that each scratch buffer needs for this and for any smaller call.
    """

    units: int
    workers: int
    items: int
    parts: int
    most_tokens: int
    scratch: dict[str, int]
    largest: dict[str, int]
    launches: tuple[Launch, ...]


def plan_constants() -> dict[str, int]:
    """Return the constants of the planner, by their names in the C struct SharpPlanConstants and in its order."""
    return {
        "decode_waves": DECODE_WAVES,
        "split_keys": SPLIT_KEYS,
        "most_splits": MOST_SPLITS,
        "most_tokens": MOST_TOKENS,
        "most_rows": MOST_ROWS,
        "most_parts": MOST_PARTS,
        "part_keys": PART_KEYS,
        "most_prompt_rows": MOST_PROMPT_ROWS,
        "listed_keys": LISTED_KEYS,
        "entmax_counts": COUNTS,
        "sparsemax_counts": SPARSEMAX_COUNTS,
    }


def plan_launches(options: Options, shapes: Shapes, decode_rows: int, prompt_rows: int, prompt_keys: int) -> LaunchPlan:
    """Plan the launches of a call. Equal calls get the same object, so the dicts of the plan must not be changed.

    Args:
        options: the call's options, whose `rows` and `keys` are not read; for entmax `power` stands for alpha.
        shapes: the call's sizes.
        decode_rows: query rows in a tile of decoding.
        prompt_rows: query rows in a tile of prefill.
        prompt_keys: keys in a tile of prefill.

    Raises:
        SharpError: the native library is missing, or a size is not positive.
    """
    return _planned(options, shapes, decode_rows, prompt_rows, prompt_keys, tuple(plan_constants().values()))


class _Request(ctypes.Structure):
    """SharpPlanRequest of launch_plan.h in ctypes."""

    _fields_ = (
        ("constants", ctypes.c_int64 * 11),
        ("normalizer", ctypes.c_int),
        ("alpha", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("contiguous", "scaled", "screened")),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "max_blocks", "block_size", "q_heads")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "value_dim", "new_keys", "multiprocessors")),
        *((name, ctypes.c_int64) for name in ("decode_rows", "prompt_rows", "prompt_keys")),
    )


class _Launch(ctypes.Structure):
    """SharpLaunch of launch_plan.h in ctypes."""

    _fields_ = (("function", ctypes.c_char_p), ("grid", ctypes.c_int64 * 3), ("stage", ctypes.c_int64))


class _Scratch(ctypes.Structure):
    """SharpScratch of launch_plan.h in ctypes."""

    _fields_ = tuple((name, ctypes.c_int64) for name in SCRATCH)


class _Plan(ctypes.Structure):
    """SharpPlan of launch_plan.h in ctypes."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("units", "workers", "items", "parts", "most_tokens")),
        ("scratch", _Scratch),
        ("largest", _Scratch),
        ("count", ctypes.c_int64),
        ("launches", _Launch * MOST_LAUNCHES),
    )


@lru_cache(maxsize=4096)
def _planned(
    options: Options,
    shapes: Shapes,
    decode_rows: int,
    prompt_rows: int,
    prompt_keys: int,
    constants: tuple[int, ...],
) -> LaunchPlan:
    request = _Request(
        constants=constants,
        normalizer=next(normalizer.code for normalizer in NORMALIZERS if normalizer.name == options.normalizer),
        alpha={"one": 2.0, "two": 1.5}.get(options.power, 1.25),
        contiguous=options.contiguous,
        scaled=options.quantized,
        screened=options.screened,
        tokens=shapes.tokens,
        sequences=shapes.sequences,
        max_blocks=shapes.max_blocks,
        block_size=options.block_size,
        q_heads=shapes.q_heads,
        kv_heads=shapes.kv_heads,
        value_dim=options.value_dim,
        new_keys=shapes.new_keys,
        multiprocessors=shapes.multiprocessors,
        decode_rows=decode_rows,
        prompt_rows=prompt_rows,
        prompt_keys=prompt_keys,
    )
    plan = _Plan()
    if _library().sharp_plan(ctypes.byref(request), ctypes.byref(plan)):
        raise SharpError(f"a call with {shapes} cannot be planned; its heads and tiles must be positive")
    scratch, largest = ({name: int(getattr(sizes, name)) for name in SCRATCH} for sizes in (plan.scratch, plan.largest))
    launches = tuple(
        Launch(launch.function.decode(), (launch.grid[0], launch.grid[1], launch.grid[2]), launch.stage)
        for launch in plan.launches[: plan.count]
    )
    return LaunchPlan(plan.units, plan.workers, plan.items, plan.parts, plan.most_tokens, scratch, largest, launches)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(library_path("onnxruntime"))
