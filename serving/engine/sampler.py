"""Draws the next token of every sequence of a step."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins import sampling
from sharp.serving.engine.adjust import adjust, changes
from sharp.serving.engine.place import Place

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def sample(logits: NDArray[np.float32], places: Rows[Place]) -> NDArray[np.int64]:
    """The token at each place: logits float32 [places, vocab] -> int64 [places].

    Each row is computed from that row alone and each sequence draws from a generator of its own, so the tokens of a
    sequence depend neither on what else is in the batch nor on what was guessed. A row whose highest logit is not
    finite has no next token: `sampling.NO_TOKEN`. Adjustments are written into `logits`, unless the model's own are
    still wanted for logprobs.
    """
    changed = [place for place in places if changes(place)]
    if changed:
        if any(place.sequence.request.params.logprobs is not None for place in changed):
            logits = logits.copy()
        adjust(logits, places)
    return sampling.sample(logits, np.array([_row(place) for place in places], np.float64))


def _row(place: Place) -> tuple[float, float, float, float, float]:
    params = place.sequence.request.params
    if params.temperature == 0:
        return 0, 0, 1, 0, 0
    sharpness = 1 / min(max(params.temperature, SMALLEST), LARGEST)
    return sharpness, params.top_k, params.top_p, params.min_p, place.sequence.uniform(len(place.guessed))
