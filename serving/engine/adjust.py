"""What requests ask to be changed in the logits before a token is drawn."""

from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.serving.engine.sequence import Sequence

# A repetition penalty outside these would make logits that are not finite, and does nothing else than the nearer one.
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30


def changes(sequence: Sequence) -> bool:
    """Whether `adjust` does anything to the logits of a sequence."""
    params = sequence.request.params
    return bool(sequence.guide or sequence.counts or params.logit_bias or sequence.generated < params.min_tokens)


def adjust(logits: NDArray[np.float32], sequences: Rows[Sequence]) -> None:
    """Apply masks, logit bias and penalties in place: logits float32 [sequences, vocab].

    Only the entries that change are touched: the cost follows the number of distinct tokens, not the vocabulary.
    """
    for row, sequence in enumerate(sequences):
        if sequence.guide:
            np.copyto(logits[row], -np.inf, where=~sequence.guide.allowed(logits.shape[1]))
    rows, tokens, _ = _entries(sequences, _too_early)
    logits[rows, tokens] = -np.inf
    rows, tokens, values = _entries(sequences, _bias)
    np.add.at(logits, (rows, tokens), values[:, 0])
    rows, tokens, values = _entries(sequences, _penalties)
    if len(rows):
        counts, repetition, presence, frequency = values.T
        old = logits[rows, tokens]
        new = np.where(old > 0, old / repetition, old * repetition)
        logits[rows, tokens] = new - presence * (counts > 0) - frequency * counts


def leaves_none(sequence: Sequence, vocab_size: int) -> bool:
    """Whether `adjust` takes every token from a sequence: all that may follow would end the answer too early."""
    early = _too_early(sequence)
    if early is None:
        return False
    allowed = sequence.guide.allowed(vocab_size) if sequence.guide else np.ones(vocab_size, np.bool_)
    allowed[early[0]] = False
    return not allowed.any()


# Of one sequence: token ids int64 [entries], and what belongs to each, float32 [entries, values].
Entries = tuple[NDArray[np.int64], NDArray[np.float32]]


def _too_early(sequence: Sequence) -> Entries | None:
    """The tokens that would end the answer before `min_tokens`."""
    if sequence.generated >= sequence.request.params.min_tokens or not sequence.stop_token_ids:
        return None
    tokens = np.fromiter(sequence.stop_token_ids, np.int64)
    return tokens, np.empty((len(tokens), 1), np.float32)


def _bias(sequence: Sequence) -> Entries | None:
    bias = sequence.request.params.logit_bias
    if not bias:
        return None
    return np.array([token for token, _ in bias], np.int64), np.array([[value] for _, value in bias], np.float32)


def _penalties(sequence: Sequence) -> Entries | None:
    """The tokens of prompt and answer with count in the answer, repetition, presence and frequency penalty."""
    if not sequence.counts:
        return None
    params, counts = sequence.request.params, sequence.counts
    values = np.empty((len(counts.token_ids), 4), np.float32)
    values[:, 0] = counts.counts
    repetition = min(max(params.repetition_penalty, SMALLEST_FACTOR), LARGEST_FACTOR)
    values[:, 1:] = repetition, params.presence_penalty, params.frequency_penalty
    return counts.token_ids, values


def _entries(
    sequences: Rows[Sequence], of: Callable[[Sequence], Entries | None]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """The entries of all rows in one: row and token id int64 [entries], values float32 [entries, values]."""
    found: list[tuple[int, Entries]] = [
        (row, entries) for row, sequence in enumerate(sequences) if (entries := of(sequence))
    ]
    if not found:
        return _NONE, _NONE, np.empty((0, 1), np.float32)
    return (
        np.repeat([row for row, _ in found], [len(tokens) for _, (tokens, _) in found]),
        np.concatenate([tokens for _, (tokens, _) in found]),
        np.concatenate([values for _, (_, values) in found]),
    )


_NONE = np.empty(0, np.int64)
