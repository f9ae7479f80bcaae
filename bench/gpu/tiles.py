"""Times of other tiles than `tiles.decode_tile` and `prefill_tile` choose, and of prompts by specialized warps.

Who tunes them decides by these, and whether SHARP_SPECIALIZED_PROMPTS becomes the default.
"""

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

# Of three stages a key has one, of five two and of seven three: its block is loaded before it.
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
SPECIALIZED = ("softmax", "ssa")
SPECIALIZED_BLOCK = 128  # keys of a tile
MOST_DIFFERENCE = 1e-2  # of the outputs' norm, in bfloat16
CASES = {"decode": (((8191, 1),) * 32, DECODE), "prefill": (((0, 8192),), PREFILL)}


def jobs() -> list[Job]:
    """The kernels that are launched."""
    calls = {name: make_call(name, ((1, 1),), device="cpu") for name in NORMALIZERS}
    return [
        Job(options_of(call), phase, tile)  # type: ignore[arg-type]
        for phase, (_, tried) in CASES.items()
        for call in calls.values()
        for tile in (None, *tried)
    ] + [
        Job(options_of(make_call(name, ((1, 1),), device="cpu", block_size=SPECIALIZED_BLOCK)), "prefill", None, on)
        for name in SPECIALIZED
        for on in (False, True)
    ]


def tiles(cases: Cases) -> Iterator[dict[str, Any]]:
    """A row for each normalizer, phase and tile, and for the tile that is used now (`tile` is "own").

    So too for prompts over blocks of 128 keys, as they are computed now and "specialized".
    """
    for phase, (sequences, tried) in CASES.items():
        for normalizer in NORMALIZERS:
            for tile in (None, *tried):
                shown = (
                    "own" if tile is None else f"{tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
                )
                named = {"phase": phase, "normalizer": normalizer, "tile": shown}
                yield from cases.run(named, partial(_time, phase, normalizer, sequences, tile))
    for normalizer in SPECIALIZED:
        for shown in ("own", "specialized"):
            kind = {"phase": "prefill", "normalizer": normalizer, "block_size": SPECIALIZED_BLOCK, "tile": shown}
            yield from cases.run(kind, partial(_time_specialized, normalizer, shown == "specialized"))


def _time_specialized(normalizer: str, on: bool) -> Iterator[dict[str, Any]]:
    call = make_call(normalizer, CASES["prefill"][0], spread=SPREAD, block_size=SPECIALIZED_BLOCK)
    expected = run(call)[0].float()
    chosen = kernels(options_of(call), capability(), specialized=on)
    with mock.patch.object(launching, "_kernels", lambda *_: chosen):
        difference = float((run(call)[0].float() - expected).norm() / expected.norm())
        milliseconds = time_call(lambda: run(call)).median
    yield {"milliseconds": milliseconds, "difference": difference, "holds": difference <= MOST_DIFFERENCE}


def _time(
    phase: str, normalizer: str, sequences: tuple[tuple[int, int], ...], tile: Tile | None
) -> Iterator[dict[str, Any]]:
    call = make_call(normalizer, sequences, spread=SPREAD)
    chosen = kernels(options_of(call), capability(), **{f"{phase}_as": tile})
    with mock.patch.object(launching, "_kernels", lambda *_: chosen):
        yield {"milliseconds": time_call(lambda: run(call)).median}
