"""Times of other tiles than `tiles.decode_tile` and `prefill_tile` choose, from which tiles are tuned."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

from bench.gpu.cases import Cases
from bench.gpu.compilation import Job, capability, options_of
from bench.gpu.inputs import make_call, run
from bench.gpu.speed import SPREAD, time_call
from sharp.plugins.triton import launching
from sharp.plugins.triton.tiles import Tile
from sharp.plugins.triton.variants import kernels

# Of three stages a tile of keys has one, of five two and of seven three, because its block is loaded before it.
DECODE = [
    *(Tile(16, 64, 4, stages) for stages in (3, 5, 7)),
    Tile(16, 32, 4, 7),
    Tile(16, 128, 4, 5),
    Tile(16, 128, 8, 5),
]
PREFILL = [
    *(Tile(128, 128, 8, stages) for stages in (3, 5)),
    *(Tile(128, 64, 8, stages) for stages in (3, 5, 7)),
    *(Tile(64, 64, 4, stages) for stages in (3, 5)),
    Tile(64, 128, 4, 3),
    Tile(128, 32, 8, 5),
]
NORMALIZERS = ("softmax", "entmax", "adaptive_softmax", "ssa")
CASES = {"decode": (((8191, 1),) * 32, DECODE), "prefill": (((0, 8192),), PREFILL)}


def jobs() -> list[Job]:
    """Return the kernels to compile before `tiles`: every normalizer, phase and tile that is tried."""
    calls = {name: make_call(name, ((1, 1),), device="cpu") for name in NORMALIZERS}
    return [
        Job(options_of(call), phase, tile)  # type: ignore[arg-type]
        for phase, (_, tried) in CASES.items()
        for call in calls.values()
        for tile in (None, *tried)
    ]


def tiles(cases: Cases) -> Iterator[dict[str, Any]]:
    """Yield a row for each normalizer, phase and tile, and for the tile that is used now (`tile` is "own")."""
    for phase, (sequences, tried) in CASES.items():
        for normalizer in NORMALIZERS:
            for tile in (None, *tried):
                shown = (
                    "own" if tile is None else f"{tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
                )
                named = {"phase": phase, "normalizer": normalizer, "tile": shown}
                yield from cases.run(named, partial(_time, phase, normalizer, sequences, tile))


def _time(
    phase: str, normalizer: str, sequences: tuple[tuple[int, int], ...], tile: Tile | None
) -> Iterator[dict[str, Any]]:
    """Yield one row: milliseconds with `tile` for the kernels of a phase of `CASES`; None is the default tile.

    `sequences` are (context, new tokens) of each sequence.
    """
    call = make_call(normalizer, sequences, spread=SPREAD)
    chosen = kernels(options_of(call), capability(), **{f"{phase}_as": tile})
    with mock.patch.object(launching, "_kernels", lambda *_: chosen):
        yield {"milliseconds": time_call(lambda: run(call)).median}
