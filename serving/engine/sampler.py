"""`Sampler`: draws the next token of every sequence of a step."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.serving.engine.adjust import adjust
from sharp.serving.engine.sequence import Sequence
from sharp.serving.sampling_params import SamplingParams

NO_TOKEN = -1
DEPTH = 16
NUCLEUS = 2048  # the tokens that reach top-p are nearly always fewer


class Sampler:
    """Draws tokens; each row is computed from that row alone and each sequence draws from a generator of its own.

    So the tokens of a sequence do not depend on what else is in the batch. Adjustments and the search for the highest
    logit are passes over the batch. Weights are made row by row in one buffer: a row fits into a processor's cache, and
    memory of the size of a batch would be taken from the system anew in every step.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._weights = np.zeros((DEPTH, -(-vocab_size // DEPTH)), np.float32)  # its end is 0 for ever

    def sample(self, logits: NDArray[np.float32], sequences: Rows[Sequence]) -> NDArray[np.int64]:
        """The next token of each sequence: logits float32 [sequences, vocab] -> int64 [sequences].

        A row whose highest logit is not finite has no next token: NO_TOKEN.
        """
        logits = adjust(logits, sequences)
        tokens: NDArray[np.int64] = logits.argmax(-1)
        for row, (best, sequence) in enumerate(zip(tokens.tolist(), sequences, strict=True)):
            highest = logits[row, best]  # argmax stops at a NaN
            if not np.isfinite(highest):
                tokens[row] = NO_TOKEN
            elif sequence.request.params.temperature > 0:
                tokens[row] = self._draw(logits[row], highest, sequence)
        return tokens

    def _draw(self, logits: NDArray[np.float32], highest: np.float32, sequence: Sequence) -> int:
        """Draw from softmax(logits / temperature) after top-k, top-p and min-p: logits float32 [vocab]."""
        params = sequence.request.params
        limits = np.finfo(np.float32)
        sharpness = np.float32(1 / np.clip(params.temperature, limits.tiny, limits.max))
        cells = self._weights  # [DEPTH, columns]: the column of a token is its id modulo columns
        weights = cells.reshape(-1)[: self._vocab_size]
        np.subtract(logits, highest, out=weights)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
            np.multiply(weights, sharpness, out=weights)
        np.exp(weights, out=weights)
        if params.limits_tokens:
            lowest = _lowest(weights, params)
            np.multiply(weights, weights >= lowest, out=weights)  # a copy with a mask would branch at every weight
        # First the column, then the token in it: the weights of all tokens are never cumulated.
        sums = np.cumsum(cells.sum(0), dtype=np.float64)
        target = sequence.random.random() * sums[-1]
        column = int(np.searchsorted(sums, target, side="right"))
        before = sums[column - 1] if column else 0.0
        within = np.cumsum(cells[:, column], dtype=np.float64)
        # The first place where the cumulated weights are more than the target, so never one of weight 0.
        place = int(np.searchsorted(within, target - before, side="right"))
        if place == DEPTH:  # rounding moved the target to the end of its column
            place = int(np.flatnonzero(cells[:, column])[-1])
        return place * int(cells.shape[1]) + column


def _lowest(weights: NDArray[np.float32], params: SamplingParams) -> np.float32:
    """The smallest of the weights float32 [vocab] that top-k, top-p and min-p keep, one after the other.

    Tokens that tie with it are kept too. The highest weight is 1.
    """
    limits = [np.float32(params.min_p)]
    if 0 < params.top_k < len(weights):
        limits.append(np.partition(weights, -params.top_k)[-params.top_k])
        if params.top_p < 1:
            weights = weights[weights >= limits[-1]]
    if params.top_p < 1:
        enough = params.top_p * weights.sum(dtype=np.float64)
        descending = _descending(weights, min(NUCLEUS, len(weights)))
        if descending.sum(dtype=np.float64) < enough:
            descending = _descending(weights, len(weights))
        last = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), enough))
        limits.append(descending[min(last, len(descending) - 1)])
    return max(limits)


def _descending(weights: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The `count` largest weights, largest first; to find them and sort few is faster than to sort all."""
    return np.sort(np.partition(weights, -count)[-count:])[::-1]
