"""Draws the next token of every sequence of a step."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins import sampling
from sharp.serving.engine.adjust import adjust, changes
from sharp.serving.engine.sequence import Sequence

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def sample(logits: NDArray[np.float32], sequences: Rows[Sequence]) -> NDArray[np.int64]:
    """The next token of each sequence: logits float32 [rows, vocab] -> int64 [rows].

    Rows of the same sequence are of tokens that follow each other. Each row is computed from that row alone and each
    sequence draws from a generator of its own, so the tokens of a sequence do not depend on what else is in the batch.
    A row whose highest logit is not finite has no next token: `sampling.NO_TOKEN`. Adjustments are written into
    `logits`, unless the model's own are still wanted for logprobs.
    """
    changed = [one for one in sequences if changes(one)]
    if changed:
        if any(one.request.params.logprobs is not None for one in changed):
            logits = logits.copy()
        adjust(logits, sequences)
    return sampling.sample(logits, np.array([*_samplings(sequences)], np.float64))


def _samplings(sequences: Rows[Sequence]) -> Iterator[tuple[float, float, float, float, float]]:
    before, ahead = None, 0
    for sequence in sequences:
        ahead = ahead + 1 if sequence is before else 0
        before = sequence
        yield _sampling(sequence, ahead)


def _sampling(sequence: Sequence, ahead: int) -> tuple[float, float, float, float, float]:
    params = sequence.request.params
    if params.temperature == 0:
        return 0, 0, 1, 0, 0
    sharpness = 1 / min(max(params.temperature, SMALLEST), LARGEST)
    return sharpness, params.top_k, params.top_p, params.min_p, sequence.uniform(ahead)
