"""Log probabilities of tokens, from the model's own logits."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.serving.engine.batch import Outputs
from sharp.serving.engine.events import TokenLogprobs
from sharp.serving.engine.sampler import NO_TOKEN
from sharp.serving.engine.scheduler import Chunk


def token_logprobs(logits: NDArray[np.float32], token_ids: Rows[int], top: int) -> list[TokenLogprobs]:
    """For each row of logits float32 [rows, vocab] those of its token and of the `top` most likely ones."""
    if not len(logits):
        return []
    highest = logits.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):  # a row that is not finite: its request fails
        normalizer = highest[:, 0] + np.log(np.exp(logits - highest).sum(1, dtype=np.float64))  # [rows]
        best = _largest(logits, top) if top else np.empty((len(logits), 0), np.int64)
        best_logprobs = np.take_along_axis(logits, best, 1) - normalizer[:, None]
        chosen = logits[np.arange(len(logits)), list(token_ids)] - normalizer
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(
            token_ids, chosen.tolist(), best.tolist(), best_logprobs.tolist(), strict=True
        )
    ]


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The tokens of the `count` largest logits of each row, best first: int64 [rows, count]."""
    found = np.empty((len(logits), min(count, logits.shape[1])), np.int64)
    for row, values in zip(found, logits, strict=True):
        candidates = np.flatnonzero(values >= np.partition(values, -len(row))[-len(row)])
        if len(candidates) < len(row):  # there is a NaN among them
            candidates = np.arange(len(values))
        row[:] = candidates[np.argsort(-values[candidates], kind="stable")[: len(row)]]
    return found


def answer_logprobs(
    chunks: Rows[Chunk], outputs: Outputs, logits: NDArray[np.float32], tokens: list[int]
) -> dict[int, TokenLogprobs]:
    """Those of the new tokens, by chunk, where they are asked for."""
    found = {}
    for place, (row, token) in enumerate(zip(outputs.sampling, tokens, strict=True)):
        top = chunks[row].sequence.request.params.logprobs
        if top is not None and token != NO_TOKEN:
            found[row] = token_logprobs(logits[place : place + 1], [token], top)[0]
    return found


def prompt_logprobs(
    chunks: Rows[Chunk], outputs: Outputs, logits: NDArray[np.float32]
) -> dict[int, list[TokenLogprobs]]:
    """Those of the prompts' tokens, by chunk, where they are asked for."""
    found = {}
    start = len(outputs.sampling)
    for row, count in outputs.prompt:
        sequence = chunks[row].sequence
        known = len(sequence.prompt_logprobs)
        following = sequence.request.prompt_ids[known + 1 : known + 1 + count]
        top = sequence.request.params.prompt_logprobs or 0
        found[row] = token_logprobs(logits[start : start + count], following, top)
        start += count
    return found
