"""Draws the next token of every sequence of a step."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.serving.engine.adjust import adjust
from sharp.serving.engine.candidates import descending_maxima, grid
from sharp.serving.engine.sequence import Sequence
from sharp.serving.sampling_params import SamplingParams

NO_TOKEN = -1


def sample(logits: NDArray[np.float32], sequences: Rows[Sequence]) -> NDArray[np.int64]:
    """The next token of each sequence: logits float32 [sequences, vocab] -> int64 [sequences].

    Every row is computed from that row alone, and every sequence draws from a generator of its own, so the result
    for one does not depend on the others. A row whose highest logit is not finite has no next token: NO_TOKEN.
    """
    logits = adjust(logits, sequences)
    best: NDArray[np.int64] = logits.argmax(-1)
    highest = np.take_along_axis(logits, best[:, None], -1)  # [sequences, 1]; argmax stops at a NaN
    finite = np.isfinite(highest[:, 0])
    best[~finite] = NO_TOKEN
    drawing = np.array([one.request.params.temperature > 0 for one in sequences], bool)
    random = np.flatnonzero(finite & drawing).tolist()
    if random:
        best[random] = _draw(logits[random] - highest[random], [sequences[row] for row in random])
    return best


def _draw(logits: NDArray[np.float32], sequences: Rows[Sequence]) -> NDArray[np.int64]:
    """Draw from softmax(logits / temperature) after top-k, top-p and min-p; the highest logit of each row is 0."""
    limits = np.finfo(np.float32)
    temperatures = np.clip([one.request.params.temperature for one in sequences], limits.tiny, limits.max)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
        logits /= temperatures.astype(np.float32)[:, None]
    cells = grid(np.exp(logits, out=logits), 0)  # [rows, DEPTH, columns]
    limited = [row for row, one in enumerate(sequences) if one.request.params.limits_tokens]
    if limited:
        weights = cells.reshape(len(cells), -1)  # [rows, vocab and what fills it up]
        lowest = np.zeros((len(cells), 1), np.float32)
        for row, maxima in zip(limited, descending_maxima(cells[limited]), strict=True):
            lowest[row] = _lowest(weights[row], maxima, sequences[row].request.params)
        weights *= weights >= lowest  # a product has no branch for every weight, a masked copy has
    sums = cells.sum(1, dtype=np.float64).cumsum(1)  # [rows, columns]
    return np.array([_draw_one(*row) for row in zip(cells, sums, sequences, strict=True)], np.int64)


def _draw_one(cells: NDArray[np.float32], sums: NDArray[np.float64], sequence: Sequence) -> int:
    """Draw in proportion to the weights `cells` [DEPTH, columns], `sums` cumulated over columns [columns]."""
    target = sequence.random.random() * sums[-1]
    column = int(np.searchsorted(sums, target, side="right"))
    before = sums[column - 1] if column else 0.0
    within = np.cumsum(cells[:, column], dtype=np.float64)
    # The first place where the cumulated weights are more than the target, so never one of weight 0.
    place = int(np.searchsorted(within, target - before, side="right"))
    if place == len(within):  # rounding moved the target to the end of its column
        place = int(np.flatnonzero(cells[:, column])[-1])
    return place * int(cells.shape[1]) + column


def _lowest(weights: NDArray[np.float32], maxima: NDArray[np.float32], params: SamplingParams) -> np.float32:
    """The smallest of the weights float32 [vocab] that top-k, top-p and min-p keep, one after the other.

    Tokens that tie with it are kept too. The highest weight is 1.
    """
    lowest = np.float32(params.min_p)
    if 0 < params.top_k < len(weights):
        lowest_of_k = np.partition(weights, -params.top_k)[-params.top_k]
        lowest = max(lowest, lowest_of_k)
        if params.top_p < 1:
            weights = weights[weights >= lowest_of_k]
    if params.top_p < 1:
        total = weights.sum(dtype=np.float64)
        # The largest of each column are some of the weights: those from here on sum up to `top_p` of all at least.
        enough = int(np.searchsorted(np.cumsum(maxima, dtype=np.float64), params.top_p * total))
        candidates = weights >= (maxima[enough] if enough < len(maxima) else np.float32(0))
        if np.count_nonzero(candidates) < len(weights) // 64:  # to pick many takes longer than to sort them all
            weights = weights[candidates]
        descending = np.sort(weights)[::-1]
        last = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), params.top_p * total))
        lowest = max(lowest, descending[min(last, len(descending) - 1)])
    return lowest
