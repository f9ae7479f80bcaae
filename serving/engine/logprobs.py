"""Log probabilities of tokens, from the model's own logits."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.sampling import NO_TOKEN, logprobs
from sharp.serving.api.events import TokenLogprobs
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


def sampled_logprobs(
    chunks: Rows[Chunk], sampling: Rows[tuple[int, int]], logits: NDArray[np.float32], tokens: dict[int, list[int]]
) -> dict[int, list[TokenLogprobs]]:
    """Those of the new `tokens` of each chunk, by chunk, if requested; `sampling` has (chunk, rows of `logits`)."""
    positions: list[int] = []
    chosen: list[int] = []
    tops: list[int] = []
    of: list[int] = []
    start = 0
    for row, rows in sampling:
        top = chunks[row].sequence.request.params.logprobs
        if top is not None and NO_TOKEN not in tokens[row]:
            count = len(tokens[row])
            positions += range(start, start + count)
            chosen += tokens[row]
            tops += [top] * count
            of += [row] * count
        start += rows
    found: dict[int, list[TokenLogprobs]] = {}
    if positions:
        for row, one in zip(of, token_logprobs(logits, positions, chosen, tops), strict=True):
            found.setdefault(row, []).append(one)
    return found


def prompt_logprobs(
    chunks: Rows[Chunk], prompt: Rows[tuple[int, int]], logits: NDArray[np.float32]
) -> dict[int, list[TokenLogprobs]]:
    """Those of the prompts' tokens, by chunk, if requested; `prompt` has (chunk, rows of `logits`)."""
    found = {}
    start = 0
    for row, count in prompt:
        sequence = chunks[row].sequence
        known = len(sequence.prompt.logprobs)
        following = sequence.request.prompt_ids[known + 1 : known + 1 + count]
        top = sequence.request.params.prompt_logprobs or 0
        found[row] = token_logprobs(logits, range(start, start + count), following, [top] * count)
        start += count
    return found
