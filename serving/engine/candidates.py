"""Which few entries of a long row can be among its largest, without sorting the row."""

import numpy as np
from numpy.typing import NDArray

DEPTH = 64


def grid(values: NDArray[np.float32], fill: float) -> NDArray[np.float32]:
    """Rows as [rows, DEPTH, columns], entry i at (i // columns, i % columns), filled up with `fill`.

    The maxima of the columns are a cheap view of a row: at least k entries are as large as the k-th largest maximum,
    and entries as large as it have together at least the sum of the k largest maxima.
    """
    rows, length = values.shape
    columns = -(-length // DEPTH)
    if columns * DEPTH == length and values.flags.c_contiguous:
        return values.reshape(rows, DEPTH, columns)
    padded = np.full((rows, DEPTH * columns), fill, np.float32)
    padded[:, :length] = values
    return padded.reshape(rows, DEPTH, columns)


def descending_maxima(cells: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest entry of every column, largest first: [rows, DEPTH, columns] -> [rows, columns]."""
    maxima: NDArray[np.float32] = np.sort(cells.max(1), axis=1)[:, ::-1]
    return maxima


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` largest entries of each row, best first: [rows, length] -> places, int64 [rows, count]."""
    count = min(count, values.shape[1])
    maxima = descending_maxima(grid(values, -np.inf))
    found = np.empty((len(values), count), np.int64)
    for row, (entries, bounds) in enumerate(zip(values, maxima, strict=True)):
        lowest = bounds[count - 1] if 0 < count <= len(bounds) else -np.inf
        candidates = np.flatnonzero(entries >= lowest)
        if len(candidates) < count:  # there is a NaN in the row
            candidates = np.arange(len(entries))
        found[row] = candidates[np.argsort(-entries[candidates], kind="stable")[:count]]
    return found
