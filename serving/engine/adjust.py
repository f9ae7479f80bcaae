"""What requests ask to be changed in the logits before a token is drawn."""

from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from sharp.serving.engine.place import Place

# A repetition penalty outside these would make logits that are not finite, and does nothing else than the nearer one.
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30


def changes(place: Place) -> bool:
    """Whether `adjust` does anything to the logits of a place."""
    sequence = place.sequence
    return bool(sequence.guide or sequence.counts or sequence.request.params.logit_bias or place.too_early)


def adjust(logits: NDArray[np.float32], places: Rows[Place]) -> None:
    """Apply masks, logit bias and penalties in place: logits float32 [places, vocab].

    Only the entries that change are touched: the cost follows the number of distinct tokens, not the vocabulary.
    """
    for row, place in enumerate(places):
        if place.sequence.guide:
            np.copyto(logits[row], -np.inf, where=~place.sequence.guide.allowed(logits.shape[1], place.guessed))
    rows, tokens, _ = _entries(places, _too_early)
    logits[rows, tokens] = -np.inf
    rows, tokens, values = _entries(places, _bias)
    np.add.at(logits, (rows, tokens), values[:, 0])
    rows, tokens, values = _entries(places, _penalties)
    if len(rows):
        counts, repetition, presence, frequency = values.T
        old = logits[rows, tokens]
        new = np.where(old > 0, old / repetition, old * repetition)
        logits[rows, tokens] = new - presence * (counts > 0) - frequency * counts


def leaves_none(place: Place, vocab_size: int) -> bool:
    """Whether `adjust` takes every token from a place: all that may follow would end the answer too early."""
    early = _too_early(place)
    if early is None:
        return False
    guide = place.sequence.guide
    allowed = guide.allowed(vocab_size, place.guessed) if guide else np.ones(vocab_size, np.bool_)
    allowed[early[0]] = False
    return not allowed.any()


# Of one place: token ids int64 [entries], and what belongs to each, float32 [entries, values].
Entries = tuple[NDArray[np.int64], NDArray[np.float32]]


def _too_early(place: Place) -> Entries | None:
    """The tokens that would end the answer before `min_tokens`."""
    if not place.too_early or not place.sequence.stop_token_ids:
        return None
    tokens = np.fromiter(place.sequence.stop_token_ids, np.int64)
    return tokens, np.empty((len(tokens), 1), np.float32)


def _bias(place: Place) -> Entries | None:
    bias = place.sequence.request.params.logit_bias
    if not bias:
        return None
    return np.array([token for token, _ in bias], np.int64), np.array([[value] for _, value in bias], np.float32)


def _penalties(place: Place) -> Entries | None:
    """The tokens of prompt and answer with count in the answer, repetition, presence and frequency penalty."""
    if not place.sequence.counts:
        return None
    params = place.sequence.request.params
    token_ids, counts = place.sequence.counts.after(place.guessed)
    values = np.empty((len(token_ids), 4), np.float32)
    values[:, 0] = counts
    repetition = min(max(params.repetition_penalty, SMALLEST_FACTOR), LARGEST_FACTOR)
    values[:, 1:] = repetition, params.presence_penalty, params.frequency_penalty
    return token_ids, values


def _entries(
    places: Rows[Place], of: Callable[[Place], Entries | None]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """The entries of all rows in one: row and token id int64 [entries], values float32 [entries, values]."""
    found: list[tuple[int, Entries]] = [(row, entries) for row, place in enumerate(places) if (entries := of(place))]
    if not found:
        return _NONE, _NONE, np.empty((0, 1), np.float32)
    return (
        np.repeat([row for row, _ in found], [len(tokens) for _, (tokens, _) in found]),
        np.concatenate([tokens for _, (tokens, _) in found]),
        np.concatenate([values for _, (_, values) in found]),
    )


_NONE = np.empty(0, np.int64)
