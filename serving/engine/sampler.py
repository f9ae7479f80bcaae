"""Sampling of the next token of every sequence in a step, after its logits processors.

Logits processors are masks (guided, allowed tokens, bad words, `min_tokens`), `logit_bias` and penalties.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cpu import sampling as native
from sharp.plugins.cpu.sampling import CHANGE, Changes
from sharp.serving.engine.sequence import Sequence

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
# A repetition penalty outside these limits would make logits that are not finite. It is replaced by the nearer limit,
# which has the same effect.
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30


@dataclass(frozen=True)
class SamplingRow:
    """A row of logits, for the token that follows a sequence and `draft`, the first tokens of its draft."""

    sequence: Sequence
    draft: tuple[int, ...] = ()

    @property
    def below_min_tokens(self) -> bool:
        """Whether the sequence must not end with this token, because it has fewer than `min_tokens` tokens."""
        return self.sequence.generated + len(self.draft) < self.sequence.request.params.min_tokens


@dataclass(frozen=True)
class StepSampling:
    """The sampling parameters of a step's rows: everything that is known before the logits are.

    Attributes:
        parameters: float64 [rows, 5], the parameters of `plugins.cpu.sampling.sample`.
        changed: logits processors may change the logits of some row.
        masked: a guide or a list of allowed tokens masks the whole vocabulary of some row.
        copied: logprobs are requested for a changed row. They come from the model's own logits, so these are copied.
        logprobs: logprobs are requested for some row.
    """

    rows: tuple[SamplingRow, ...]
    parameters: NDArray[np.float64]
    changed: bool
    masked: bool
    copied: bool
    logprobs: bool

    @classmethod
    def of(cls, rows: Rows[SamplingRow]) -> Self:
        """Return the sampling of `rows`. Each row may follow a token that is expected but not known yet."""
        changed = [row for row in rows if _changes_logits(row)]
        return cls(
            tuple(rows),
            np.array([_parameters(row) for row in rows], np.float64).reshape(-1, 5),
            bool(changed),
            any(row.sequence.sampling.guide or row.sequence.sampling.allowed is not None for row in rows),
            any(row.sequence.request.params.logprobs is not None for row in changed),
            any(row.sequence.request.params.logprobs is not None for row in rows),
        )

    @property
    def sparse(self) -> bool:
        """Whether `parameters` and `changes_of` describe the sampling completely, and no logits are needed."""
        return not (self.masked or self.logprobs)


def sample(
    logits: NDArray[np.float32], sampling: StepSampling, threads: int = 1, changes: Changes | None = None
) -> NDArray[np.int64]:
    """Return the token of each row, int64 [rows], sampled from logits float32 [rows, vocab] with `threads` threads.

    Each row is computed from its own logits, and each sequence has its own random generator, so the tokens of a
    sequence depend neither on the rest of the batch nor on its draft. A row whose highest logit is not finite gets
    `sampling.NO_TOKEN`. Logits are changed in place, unless logprobs need the model's own. `changes` is the result of
    `changes_of` for these rows, if it is known already.
    """
    if changes is not None:
        changes.apply(logits)
    elif sampling.changed:
        if sampling.copied:
            logits = logits.copy()
        apply(logits, sampling.rows)
    return native.sample(logits, sampling.parameters, threads=threads)


def _parameters(row: SamplingRow) -> tuple[float, float, float, float, float]:
    """Return the inverse temperature, top-k, top-p, min-p and random number of a row."""
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
    """Apply masks, logit bias and penalties to logits float32 [rows, vocab], in place.

    Logit bias, bad words and penalties touch only the entries that change, so their cost grows with the number of
    distinct tokens, not with the vocabulary.
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
    changes_of(rows).apply(logits)


def changes_of(rows: Rows[SamplingRow]) -> Changes:
    """Return the changes that `min_tokens`, bad words and `logit_bias`, and then penalties, make to each row's logits.

    The tokens of all rows are processed together. A row has so few that numpy calls per row would cost more.
    """
    parts = [part for row in rows for part in (_biases(row), _penalties(row))]
    lengths = [len(part.token_ids) for part in parts]
    if not any(lengths):  # only guides or allowed tokens change the logits
        return Changes(np.zeros(len(parts) + 1, np.int32), np.zeros(0, CHANGE))
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    entries = np.zeros(starts[-1], CHANGE)
    entries["token"] = np.concatenate([_NONE.token_ids, *(part.token_ids for part in parts)])
    factors = np.array([part.factors for part in parts], np.float32).reshape(-1, 3)
    repetition, presence, frequency = np.repeat(factors, lengths, axis=0).T
    counts = np.concatenate([_NONE.counts, *(part.counts for part in parts)])
    entries["repetition"] = repetition
    entries["amount"] = presence * (counts > 0) + frequency * counts
    for part, start, length in zip(parts, starts.tolist(), lengths, strict=False):
        if part.biases:
            entries["bias"][start : start + length] = part.biases
    return Changes(starts, entries)


def masks_all(row: SamplingRow, vocab_size: int) -> bool:
    """Whether the masks of a row leave no token of the vocabulary."""
    guide, own = row.sequence.sampling.guide, row.sequence.sampling.allowed
    allowed = guide.allowed(vocab_size, row.draft) if guide else np.ones(vocab_size, np.bool_)
    if own is not None:
        kept = np.zeros(vocab_size, np.bool_)
        kept[own] = allowed[own]
        allowed = kept
    allowed[[*_early_stops(row), *_bad_words(row)]] = False
    return not allowed.any()


def _early_stops(row: SamplingRow) -> frozenset[int]:
    """Return the tokens that would end the sequence before `min_tokens`."""
    return frozenset(row.sequence.stop.token_ids) if row.below_min_tokens else frozenset()


def _bad_words(row: SamplingRow) -> frozenset[int]:
    """Return the tokens that would complete a bad word."""
    sequence = row.sequence
    if not (words := sequence.request.bad_word_ids):
        return frozenset()
    past = (*sequence.token_ids[len(sequence.request.prompt_ids) :], *row.draft)
    return frozenset(
        word[-1] for word in words if past[max(0, len(past) - len(word) + 1) :] == word[:-1] or len(word) == 1
    )


class _Part(NamedTuple):
    """One group of changes to a row: tokens, the number of times each was generated, penalties and, if any, biases."""

    token_ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    factors: tuple[float, float, float]  # repetition, presence, frequency
    biases: list[float]


_NONE = _Part(np.empty(0, np.int64), np.empty(0, np.float32), (1, 0, 0), [])


def _biases(row: SamplingRow) -> _Part:
    """Return the masked tokens of a row, as biases of -infinity, and its logit biases."""
    masked = _early_stops(row) | _bad_words(row)
    bias = row.sequence.request.params.logit_bias
    if not masked and not bias:
        return _NONE
    added: dict[int, float] = {}
    for token, value in bias:
        added[token] = added.get(token, 0) + value
    added |= dict.fromkeys(masked, -np.inf)
    return _Part(np.array([*added]), np.zeros(len(added), np.float32), _NONE.factors, [*added.values()])


def _penalties(row: SamplingRow) -> _Part:
    """Return the sequence's tokens, how often each was generated, and its penalties; empty without penalties."""
    if not row.sequence.sampling.counts:
        return _NONE
    params = row.sequence.request.params
    repetition = min(max(params.repetition_penalty, SMALLEST_FACTOR), LARGEST_FACTOR)
    factors = repetition, params.presence_penalty, params.frequency_penalty
    return _Part(*row.sequence.sampling.counts.after(row.draft), factors, [])
