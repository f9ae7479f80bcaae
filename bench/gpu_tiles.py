"""Times of other tiles than `variants.decode_tile` and `prefill_tile` choose, for whoever tunes them."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from gpu_correctness import options_of
from gpu_inputs import make_call, run
from gpu_speed import SPREAD, time_call

from sharp.plugins.triton import paged_attention as wrapper
from sharp.plugins.triton.variants import Tile, kernels

DECODE = [Tile(16, 64, 4, 3), Tile(16, 64, 4, 5), Tile(16, 64, 4, 7), Tile(16, 128, 4, 3), Tile(16, 128, 8, 5)]
PREFILL = [
    *(Tile(128, 64, 8, stages) for stages in (2, 3, 4)),
    *(Tile(128, 128, 8, stages) for stages in (2, 3)),
    *(Tile(64, 64, 4, stages) for stages in (2, 3)),
    Tile(128, 32, 8, 3),
]
NORMALIZERS = ("softmax", "entmax", "adaptive_softmax", "ssa")
CASES = {"decode": (((8191, 1),) * 32, DECODE), "prefill": (((0, 8192),), PREFILL)}


def tiles(timely: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """A row for each normalizer, phase and tile, and for the tile that is used now (`tile` is "own")."""
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    for phase, (sequences, tried) in CASES.items():
        for normalizer in NORMALIZERS:
            call = make_call(normalizer, sequences, spread=SPREAD)
            for tile in (None, *tried):
                if not timely():
                    return
                chosen = kernels(options_of(call), capability, **{f"{phase}_as": tile})
                with mock.patch.object(wrapper, "_kernels", lambda *_, chosen=chosen: chosen):
                    try:
                        milliseconds = time_call(lambda call=call: run(call)).median
                    except Exception as error:  # a tile that does not fit the device's memory or registers
                        print(f"  {tile}: {str(error).splitlines()[0][:100]}")
                        continue
                shown = (
                    "own" if tile is None else f"{tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
                )
                yield {"phase": phase, "normalizer": normalizer, "tile": shown, "milliseconds": milliseconds}
