"""The sizes of tiles of the loops over keys, for every kind of device."""

from dataclasses import dataclass

from sharp.plugins.triton.options import Options

DECODE_ROWS = 16  # the minimum of a matrix product
MOST_PROMPT_ROWS = 128
LARGE_SHARED_MEMORY = (80, 87, 90, 100, 103, 110)  # capabilities with 163 or 227 KiB per block; others have 99 KiB


@dataclass(frozen=True)
class Tile:
    """The size and schedule of a loop over keys: query rows times keys, warps, and loads in flight (`num_stages`)."""

    rows: int
    keys: int
    warps: int
    stages: int


def decode_tile(options: Options, capability: int) -> Tile:
    """Return the tile of decoding for these types and sizes on a GPU of this compute capability (90 is 9.0)."""
    size = _width(options) * _bytes(options)  # bytes of a key
    keys = 64 if size <= 256 else 32 if size <= 512 else 16
    return Tile(DECODE_ROWS, keys, warps=4, stages=_stages(options, 2 if capability in LARGE_SHARED_MEMORY else 1))


def _stages(options: Options, ahead: int) -> int:
    """Return Triton's `num_stages` for a loop that loads `ahead` tiles of keys besides the current one.

    In a paged cache each tile takes two loads, one after the other: the block numbers, then the keys.
    """
    return 1 + ahead * (1 if options.contiguous else 2)


def prefill_tile(options: Options, capability: int) -> Tile:
    """Return the tile of prefill, as large as memory and registers of this compute capability (90 is 9.0) allow."""
    width = _width(options)
    if options.precision == "tf32x3":  # three operands instead of one take many registers
        if width > 128:
            return Tile(16, 16, warps=4, stages=1)
        rows, keys = (64, 32) if capability == 90 else (32, 16)
        return Tile(rows, keys, warps=4, stages=_stages(options, 1))
    stages = _stages(options, 2)
    if options.query_parts > 1:  # every part of the query takes shared memory
        size = 64 if width <= (128 if capability in LARGE_SHARED_MEMORY else 64) else 32 if width <= 128 else 16
        return Tile(size, size, warps=4, stages=stages)
    if capability in LARGE_SHARED_MEMORY:
        if width > 128:
            return Tile(MOST_PROMPT_ROWS, 32, warps=8, stages=stages)
        # More keys mean fewer instructions per key. Capability 80 has shared memory for 64 keys only; values in tf32
        # take so much that there, too, only 64 keys fit.
        few = capability == 80 or (options.wide_weights and width > 64)
        return Tile(MOST_PROMPT_ROWS, 64 if few else 128, warps=8, stages=stages)
    if width <= 128:
        return Tile(MOST_PROMPT_ROWS, 64 if width <= 64 else 32, warps=8, stages=stages)
    return Tile(64, 32, warps=4, stages=2)


def _width(options: Options) -> int:
    return max(options.head_width, options.value_width)


def _bytes(options: Options) -> int:
    return 4 if options.precision == "tf32x3" else 2
