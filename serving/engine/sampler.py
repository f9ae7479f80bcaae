"""Draws the next token of every sequence of a step."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.serving.engine.sequence import Sequence

NO_TOKEN = -1


def sample(logits: NDArray[np.float32], sequences: Rows[Sequence]) -> NDArray[np.int64]:
    """The next token of each sequence: logits float32 [sequences, vocab] -> int64 [sequences].

    Every row is computed from that row alone, and every sequence draws from a generator of its own, so the result
    for one does not depend on the others. A row whose highest logit is not finite has no next token: NO_TOKEN.
    """
    best: NDArray[np.int64] = logits.argmax(-1)
    highest = np.take_along_axis(logits, best[:, None], -1)  # [sequences, 1]; argmax stops at a NaN
    finite = np.isfinite(highest[:, 0])
    best[~finite] = NO_TOKEN
    random = finite & np.array([sequence.request.params.temperature > 0 for sequence in sequences], bool)
    if random.any():
        drawing = [sequence for sequence, drawn in zip(sequences, random, strict=True) if drawn]
        best[random] = _draw(logits[random] - highest[random], drawing)
    return best


def _draw(logits: NDArray[np.float32], sequences: Rows[Sequence]) -> NDArray[np.int64]:
    """Draw from softmax(logits / temperature) after top-k and top-p; the highest logit of each row is 0."""
    limits = np.finfo(np.float32)
    temperatures = np.clip([sequence.request.params.temperature for sequence in sequences], limits.tiny, limits.max)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
        weights = np.exp(logits / temperatures.astype(np.float32)[:, None])  # [rows, vocab]
    return np.array([_draw_one(row, sequence) for row, sequence in zip(weights, sequences, strict=True)], np.int64)


def _draw_one(weights: NDArray[np.float32], sequence: Sequence) -> int:
    """Draw a token of one sequence in proportion to its weights: float32 [vocab]."""
    params = sequence.request.params
    lowest = _threshold(weights, params.top_k, params.top_p)
    kept = np.flatnonzero(weights >= lowest) if lowest > 0 else None
    cumulative = np.cumsum(weights if kept is None else weights[kept], dtype=np.float64)
    # The first token whose cumulative weight is more than the draw, so never one of weight 0.
    drawn = int(np.searchsorted(cumulative, sequence.random.random() * cumulative[-1], side="right"))
    return drawn if kept is None else int(kept[drawn])


def _threshold(weights: NDArray[np.float32], top_k: int, top_p: float) -> np.float32:
    """The smallest of the weights that top-k and then top-p keep; tokens that tie with it are kept too."""
    lowest = np.float32(0)
    if 0 < top_k < len(weights):
        lowest = np.partition(weights, -top_k)[-top_k]
        weights = weights[weights >= lowest]
    if top_p < 1:
        total = weights.sum(dtype=np.float64)
        # All weights below this together are less than 1 - top_p, so the nucleus has none of them: few are sorted.
        descending = np.sort(weights[weights >= total * (1 - top_p) / len(weights)])[::-1]
        last = np.searchsorted(np.cumsum(descending, dtype=np.float64), top_p * total)
        lowest = descending[min(int(last), len(descending) - 1)]
    return lowest
