"""Samples the next token of every sequence of a step."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins import sampling
from sharp.serving.engine.logits_processors import SamplingRow, apply, changes_logits

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def sample(logits: NDArray[np.float32], rows: Rows[SamplingRow]) -> NDArray[np.int64]:
    """The token of each row: logits float32 [rows, vocab] -> int64 [rows].

    A row is computed from that row alone and each sequence has a random generator of its own, so the tokens of a
    sequence depend neither on the rest of the batch nor on its draft. A row whose highest logit is not finite has no
    next token: `sampling.NO_TOKEN`. Logits are changed in place, unless the model's own are needed for logprobs.
    """
    changed = [row for row in rows if changes_logits(row)]
    if changed:
        if any(row.sequence.request.params.logprobs is not None for row in changed):
            logits = logits.copy()
        apply(logits, rows)
    return sampling.sample(logits, np.array([_parameters(row) for row in rows], np.float64))


def _parameters(row: SamplingRow) -> tuple[float, float, float, float, float]:
    """Inverse temperature, top-k, top-p, min-p and the random number of a row."""
    params = row.sequence.request.params
    if params.temperature == 0:
        return 0, 0, 1, 0, 0
    inverse_temperature = 1 / min(max(params.temperature, SMALLEST), LARGEST)
    uniform = row.sequence.sampling.uniform(len(row.draft))
    return inverse_temperature, params.top_k, params.top_p, params.min_p, uniform
