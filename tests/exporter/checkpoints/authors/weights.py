"""Weights of the models in `authors`, which follow from a parameter's name and shape alone."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.float32]]:
    """Return random numbers for each parameter, around 1 for vectors that scale."""
    made = {}
    for name, shape in shapes.items():
        numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
        made[name] = np.asarray(0.4 * numbers + (len(shape) == 1 and name.endswith("weight")), np.float32)
    return made
