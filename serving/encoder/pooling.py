"""From what an encoder computes for tokens to one row for a text."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Pooling


def pool(values: NDArray[np.float32], lengths: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """Hidden states [batch, length, size] of texts of `lengths` tokens -> [batch, size]; logits stay as they are.

    A text at a time, so that padding, whatever is computed there, cannot touch a result.
    """
    if values.ndim == 2:
        return values
    pairs = zip(values, lengths, strict=True)
    if pooling == "mean":
        return np.stack([row[:length].mean(0) for row, length in pairs])
    return np.stack([row[0 if pooling == "cls" else length - 1] for row, length in pairs])
