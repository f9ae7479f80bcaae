"""Samples the next token of every sequence of a step, after its logits processors.

These are masks (guided, allowed tokens, bad words, `min_tokens`), `logit_bias` and penalties.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sharp.plugins import sampling as native
from sharp.serving.engine.sequence import Sequence

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# A repetition penalty outside these would make logits that are not finite, and does nothing else than the nearer one.
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30


@dataclass(frozen=True)
class SamplingRow:
    """A row of logits: those of the token after a sequence and `draft`, the first tokens of its draft."""

    sequence: Sequence
    draft: tuple[int, ...] = ()

    @property
    def below_min_tokens(self) -> bool:
        """Whether the sequence must not end here."""
        return self.sequence.generated + len(self.draft) < self.sequence.request.params.min_tokens


@dataclass(frozen=True)
class Sampling:
    """How the rows of a step are sampled: all that is known before its logits are.

    Attributes:
        parameters: float64 [rows, 5], what `plugins.sampling.sample` takes.
        changed: logits processors may change the logits.
        copied: of such a row logprobs are requested, and those are of the model's own logits.
        logprobs: some row's are requested.
    """

    rows: tuple[SamplingRow, ...]
    parameters: NDArray[np.float64]
    changed: bool
    copied: bool
    logprobs: bool

    @classmethod
    def of(cls, rows: Rows[SamplingRow]) -> Self:
        """That of `rows`; each may follow a token that is expected and not known yet."""
        changed = [row for row in rows if _changes_logits(row)]
        return cls(
            tuple(rows),
            np.array([_parameters(row) for row in rows], np.float64).reshape(-1, 5),
            bool(changed),
            any(row.sequence.request.params.logprobs is not None for row in changed),
            any(row.sequence.request.params.logprobs is not None for row in rows),
        )

    @property
    def plain(self) -> bool:
        """Whether `parameters` say all of it, and nobody needs the logits."""
        return not (self.changed or self.logprobs)


def sample(logits: NDArray[np.float32], sampling: Sampling, threads: int = 1) -> NDArray[np.int64]:
    """The token of each row, found by at most so many `threads`: logits float32 [rows, vocab] -> int64 [rows].

    A row is computed from that row alone and each sequence has a random generator of its own, so the tokens of a
    sequence depend neither on the rest of the batch nor on its draft. A row whose highest logit is not finite has no
    next token: `sampling.NO_TOKEN`. Logits are changed in place, unless the model's own are needed for logprobs.
    """
    if sampling.changed:
        if sampling.copied:
            logits = logits.copy()
        apply(logits, sampling.rows)
    return native.sample(logits, sampling.parameters, threads=threads)


def _parameters(row: SamplingRow) -> tuple[float, float, float, float, float]:
    """Inverse temperature, top-k, top-p, min-p and the random number of a row."""
    params = row.sequence.request.params
    if params.temperature == 0:
        return 0, 0, 1, 0, 0
    inverse_temperature = 1 / min(max(params.temperature, SMALLEST), LARGEST)
    uniform = row.sequence.sampling.uniform(row.sequence.expected + len(row.draft))
    return inverse_temperature, params.top_k, params.top_p, params.min_p, uniform


def _changes_logits(row: SamplingRow) -> bool:
    """Whether `apply` may change the logits of a row."""
    state, params = row.sequence.sampling, row.sequence.request.params
    masked = state.guide or state.allowed is not None or params.bad_words or row.below_min_tokens
    return bool(masked or state.counts or params.logit_bias)


def apply(logits: NDArray[np.float32], rows: Rows[SamplingRow]) -> None:
    """Apply masks, logit bias and penalties in place: logits float32 [rows, vocab].

    Only the entries that change are touched: the cost follows the number of distinct tokens, not the vocabulary.
    """
    if first := next((guide for row in rows if (guide := row.sequence.sampling.guide)), None):
        first.begin_step()
    for index, row in enumerate(rows):
        if guide := row.sequence.sampling.guide:
            np.copyto(logits[index], -np.inf, where=~guide.allowed(logits.shape[1], row.draft))
        if (allowed := row.sequence.sampling.allowed) is not None:
            kept = logits[index, allowed]
            logits[index] = -np.inf
            logits[index, allowed] = kept
    for masked in (_early_stops, _bad_words):
        indices, tokens, _ = _entries(rows, masked)
        logits[indices, tokens] = -np.inf
    indices, tokens, values = _entries(rows, _bias)
    np.add.at(logits, (indices, tokens), values[:, 0])
    indices, tokens, values = _entries(rows, _penalties)
    if len(indices):
        counts, repetition, presence, frequency = values.T
        old = logits[indices, tokens]
        new = np.where(old > 0, old / repetition, old * repetition)
        logits[indices, tokens] = new - presence * (counts > 0) - frequency * counts


def masks_all(row: SamplingRow, vocab_size: int) -> bool:
    """Whether `apply` masks every token of a row."""
    guide, own = row.sequence.sampling.guide, row.sequence.sampling.allowed
    allowed = guide.allowed(vocab_size, row.draft) if guide else np.ones(vocab_size, np.bool_)
    if own is not None:
        kept = np.zeros(vocab_size, np.bool_)
        kept[own] = allowed[own]
        allowed = kept
    for masked in (_early_stops(row), _bad_words(row)):
        if masked is not None:
            allowed[masked[0]] = False
    return not allowed.any()


# Of one row: token ids int64 [entries], and what belongs to each, float32 [entries, values].
Entries = tuple[NDArray[np.int64], NDArray[np.float32]]


def _early_stops(row: SamplingRow) -> Entries | None:
    """The tokens that would end the sequence before `min_tokens`."""
    if not row.below_min_tokens or not row.sequence.stop.token_ids:
        return None
    tokens = np.fromiter(row.sequence.stop.token_ids, np.int64)
    return tokens, np.empty((len(tokens), 1), np.float32)


def _bad_words(row: SamplingRow) -> Entries | None:
    """The tokens that would complete a text that must not come."""
    sequence = row.sequence
    if not (words := sequence.request.bad_word_ids):
        return None
    past = (*sequence.token_ids[len(sequence.request.prompt_ids) :], *row.draft)
    last = [word[-1] for word in words if past[max(0, len(past) - len(word) + 1) :] == word[:-1] or len(word) == 1]
    return (np.array(last, np.int64), np.empty((len(last), 1), np.float32)) if last else None


def _bias(row: SamplingRow) -> Entries | None:
    bias = row.sequence.request.params.logit_bias
    if not bias:
        return None
    return np.array([token for token, _ in bias], np.int64), np.array([[value] for _, value in bias], np.float32)


def _penalties(row: SamplingRow) -> Entries | None:
    """The sequence's tokens with generated count, repetition, presence and frequency penalty."""
    if not row.sequence.sampling.counts:
        return None
    params = row.sequence.request.params
    token_ids, counts = row.sequence.sampling.counts.after(row.draft)
    values = np.empty((len(token_ids), 4), np.float32)
    values[:, 0] = counts
    repetition = min(max(params.repetition_penalty, SMALLEST_FACTOR), LARGEST_FACTOR)
    values[:, 1:] = repetition, params.presence_penalty, params.frequency_penalty
    return token_ids, values


def _entries(
    rows: Rows[SamplingRow], of: Callable[[SamplingRow], Entries | None]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """The entries of all rows in one: row and token id int64 [entries], values float32 [entries, values]."""
    found: list[tuple[int, Entries]] = [(index, entries) for index, row in enumerate(rows) if (entries := of(row))]
    if not found:
        return _NONE, _NONE, np.empty((0, 1), np.float32)
    return (
        np.repeat([index for index, _ in found], [len(tokens) for _, (tokens, _) in found]),
        np.concatenate([tokens for _, (tokens, _) in found]),
        np.concatenate([values for _, (_, values) in found]),
    )


_NONE = np.empty(0, np.int64)
