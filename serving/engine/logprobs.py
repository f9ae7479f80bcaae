"""Log probabilities of tokens, from the model's own logits."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.sampling import NO_TOKEN, logprobs
from sharp.serving.engine.batch import Outputs
from sharp.serving.engine.events import TokenLogprobs
from sharp.serving.engine.scheduler import Chunk


def token_logprobs(
    logits: NDArray[np.float32], rows: Rows[int], token_ids: Rows[int], tops: Rows[int]
) -> list[TokenLogprobs]:
    """For each of some rows of logits float32 [rows, vocab] those of its token and of its `top` most likely ones."""
    ids, values = logprobs(logits, rows, token_ids, min(max(tops), logits.shape[1]))
    return [
        TokenLogprobs(token_id, chosen, tuple(zip(best[:top], best_logprobs[:top], strict=True)))
        for (token_id, *best), (chosen, *best_logprobs), top in zip(ids.tolist(), values.tolist(), tops, strict=True)
    ]


def answer_logprobs(
    chunks: Rows[Chunk], outputs: Outputs, logits: NDArray[np.float32], tokens: list[int]
) -> dict[int, TokenLogprobs]:
    """Those of the new tokens, by chunk, where they are asked for."""
    wanted = [
        (place, row, top)
        for place, (row, token) in enumerate(zip(outputs.sampling, tokens, strict=True))
        if (top := chunks[row].sequence.request.params.logprobs) is not None and token != NO_TOKEN
    ]
    if not wanted:
        return {}
    places = [place for place, _, _ in wanted]
    found = token_logprobs(logits, places, [tokens[place] for place in places], [top for _, _, top in wanted])
    return dict(zip([row for _, row, _ in wanted], found, strict=True))


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
        found[row] = token_logprobs(logits, range(start, start + count), following, [top] * count)
        start += count
    return found
