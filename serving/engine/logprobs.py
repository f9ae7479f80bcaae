"""Log probabilities of tokens, from the logits of the model before logits processors."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cpu.sampling import NO_TOKEN, logprobs
from sharp.serving.api.events import TokenLogprobs
from sharp.serving.engine.scheduler import Chunk


def token_logprobs(
    logits: NDArray[np.float32], rows: Rows[int], token_ids: Rows[int], tops: Rows[int]
) -> list[TokenLogprobs]:
    """Return the logprobs of one token and of the `top` most likely tokens for each of `rows`.

    Args:
        logits: float32 [all rows, vocab].
        rows: the rows of `logits` to read, at least one.
        token_ids: the token of each row.
        tops: the number of most likely tokens of each row.
    """
    ids, values = logprobs(logits, rows, token_ids, min(max(tops), logits.shape[1]))
    return [
        TokenLogprobs(token_id, chosen, tuple(zip(best[:top], best_logprobs[:top], strict=True)))
        for (token_id, *best), (chosen, *best_logprobs), top in zip(ids.tolist(), values.tolist(), tops, strict=True)
    ]


def sampled_logprobs(
    chunks: Rows[Chunk], sampling: Rows[tuple[int, int]], logits: NDArray[np.float32], tokens: dict[int, list[int]]
) -> dict[int, list[TokenLogprobs]]:
    """Return the logprobs of the new `tokens` by chunk, if requested.

    `sampling` has pairs (chunk, number of rows of `logits`).
    """
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
        for row, token in zip(of, token_logprobs(logits, positions, chosen, tops), strict=True):
            found.setdefault(row, []).append(token)
    return found


def prompt_logprobs(
    chunks: Rows[Chunk], prompt: Rows[tuple[int, int]], logits: NDArray[np.float32]
) -> dict[int, list[TokenLogprobs]]:
    """Return the logprobs of prompt tokens by chunk, if requested.

    `prompt` has pairs (chunk, number of rows of `logits`).
    """
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
