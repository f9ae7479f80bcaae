"""The keys of a decode step are shared out evenly by their number, whatever sequences they belong to."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from tests.full.triton import interpreted

WORKERS = 66  # 4 programs for each of 132 multiprocessors, over 8 KV heads
BATCHES = {
    "one long beside many short": [(131_071, 1)] + [(1023, 1)] * 63,
    "the long one last": [(1023, 1)] * 63 + [(131_071, 1)],
    "alike": [(3055, 1)] * 64,
    "one": [(131_071, 1)],
    "short": [(99, 1)] * 3,
    "several tokens": [(8000, 4), (100, 2), (0, 3)],
    "some without a token": [(5000, 1), (700, 0), (0, 1), (0, 0), (90, 1)],
    "not one each": [(5000, 2), (700, 0), (3000, 1)],
    "more than are looked at together": [(40 * number, 1) for number in range(300)],
    "a prompt beside": [(9000, 1), (50, 30), (400, 1)],
}


def tiles(length: tuple[int, int], window: int) -> int:
    """Return the number of tiles of 64 keys that the tokens of a sequence see."""
    context, new = length
    first = max(context + 1 - window, 0) if window >= 0 else 0
    return -(-(context + new) // 64) - first // 64


@pytest.mark.parametrize("window", [-1, 2000])
@pytest.mark.parametrize("name", BATCHES)
def test_every_program_has_about_as_many_keys(interpreter: ProcessPoolExecutor, name: str, window: int) -> None:
    lengths = BATCHES[name]
    most, firsts, units = interpreter.submit(interpreted.plan, lengths, 132, window).result()
    if sum(new for _, new in lengths) <= len(lengths):  # each unit is one token
        decoded = [(context + before, 1) for context, new in lengths for before in range(new)]
    else:
        room = 4 if name == "several tokens" else 1
        decoded = [(context, new if new <= room else 0) for context, new in lengths]
    needed = np.array([tiles(length, window) if length[1] else 0 for length in decoded])
    assert most == 64 * max(-(-needed.sum() // WORKERS), -(-needed.max() // 128), 4)
    # A unit has as many items as its keys need, one after the other, and no unit is left out.
    splits = -(-needed * 64 // most)
    counted = Counter(unit for unit in units if unit >= 0)
    assert all(counted[unit] <= splits[unit] for unit in range(len(decoded)))
    assert all(counted[unit] * most >= 64 * needed[unit] for unit in range(len(decoded)))
    behind = np.cumsum([0, *(counted[unit] for unit in range(len(decoded)))])
    assert firsts == behind[:-1].tolist()
    assert units[: behind[-1]] == sorted(units[: behind[-1]])
    assert set(units[behind[-1] :]) <= {-1}


def test_a_long_sequence_is_read_by_all_of_the_device(interpreter: ProcessPoolExecutor) -> None:
    # When the number of sequences decided, this batch had 2 splits, and 16 of 1,024 programs read two thirds of the
    # keys.
    most, _, units = interpreter.submit(interpreted.plan, BATCHES["one long beside many short"], 132).result()
    assert most <= 1.05 * (131_072 + 63 * 1024) / WORKERS
    assert units.count(0) == -(-131_072 // most) == 44
