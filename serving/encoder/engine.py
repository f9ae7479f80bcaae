"""`EncoderEngine`: encodes the texts of several requests together, one batch at a time."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest, Pooling
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.backends.rows import RowBackend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.row_engine import ComputedBatch, RowEngine, WaitingRow

# On a CPU larger batches are slower. With 384 channels, batches of 512 tokens took 0.91 of the time of batches of 2048,
# because activations between two matrix products stay in the CPU's cache.
CPU_BATCH_TOKENS = 512

WaitingText = WaitingRow[EncodeRequest]
Row = TypeVar("Row", bound=WaitingRow[Any])

# Shorter texts of a batch are padded. Up to FREE_TOKENS tokens a batch takes hardly longer than its longest text alone,
# because the weights are read anyway. In a larger batch, at least the share LEAST_TOKENS_SHARE must be tokens and not
# padding.
FREE_TOKENS = 128
LEAST_TOKENS_SHARE = 0.85


class EncoderEngine(RowEngine[EncodeRequest]):
    """An engine that turns texts into rows of numbers: embeddings before normalization, or logits of labels."""

    def __init__(self, backend: RowBackend, manifest: Manifest, pooling: Pooling, config: EngineConfig) -> None:
        most = config.max_batch_tokens
        super().__init__(backend, manifest, config, min(most, CPU_BATCH_TOKENS) if backend.device == "cpu" else most)
        self._pooling = pooling

    def _choose(self, waiting: Sequence[WaitingText]) -> list[WaitingText]:
        """Return the waiting texts for the next batch, within the limits of tokens and sequences."""
        return choose(waiting, self.batch_tokens, self._config.max_sequences)

    def _compute(self, batch: list[WaitingText], *, collect_stats: bool) -> ComputedBatch:
        """Run one batch; return pooled values per text, the number of padding tokens, and attention statistics."""
        inputs = pack(batch)
        output = self._backend.run(inputs, collect_stats=collect_stats)
        lengths = [text.tokens for text in batch]
        attention = None
        if output.stats is not None:
            attention = attention_rows(output.stats, inputs["attention_mask"], self._windows)
        padding = inputs["input_ids"].size - sum(lengths)
        return ComputedBatch(pool(output.values, lengths, self._pooling), padding, attention)


def pack(texts: list[WaitingText]) -> dict[str, NDArray[np.int64]]:
    """Return the model's inputs for a batch, each int64 [texts, length], with padding behind every text.

    The attention mask is 1 at tokens and 0 at padding.
    """
    shape = len(texts), max(text.tokens for text in texts)
    arrays = [np.zeros(shape, np.int64) for _ in range(3)]
    for row, text in enumerate(texts):
        tokens = text.request.request.tokens[text.index]
        for array, values in zip(arrays, (tokens.token_ids, 1, tokens.token_types or 0), strict=True):
            array[row, : text.tokens] = values
    return dict(zip(("input_ids", "attention_mask", "token_type_ids"), arrays, strict=True))


def attention_rows(
    stats: NDArray[np.float32], mask: NDArray[np.int64], windows: NDArray[np.int64] | None
) -> AttentionRows:
    """Return the statistics [layers, batch, q_heads, length, 4 or 5] of a batch as rows of tokens, without padding.

    `mask` int64 [batch, length] is 0 at padding. A token sees all tokens of its text. `windows` int64 [layers] is the
    maximum number of keys that a token sees; None if all layers see all keys.
    """
    counts = mask.astype(bool)
    lengths = np.broadcast_to(mask.sum(1, keepdims=True), mask.shape)[counts]
    return AttentionRows(stats.swapaxes(2, 3)[:, counts], lengths - 1, windows)


def pool(values: NDArray[np.float32], lengths: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """Pool hidden states [batch, length, size] of texts of `lengths` tokens to [batch, size]. Return logits unchanged.

    Each text is pooled separately, so that values at padding cannot affect a result.
    """
    if values.ndim == 2:
        return values
    pairs = zip(values, lengths, strict=True)
    if pooling == "mean":
        return np.stack([row[:length].mean(0) for row, length in pairs])
    return np.stack([row[0 if pooling == "cls" else length - 1] for row, length in pairs])


def choose(waiting: Sequence[Row], max_tokens: int, max_texts: int) -> list[Row]:
    """Return the next batch: the first waiting text, and the texts whose lengths are nearest to its length.

    `waiting` must not be empty. The batch is in the order of the lengths. With padding it has at most `max_tokens`
    tokens, unless the first text is longer, and at most `max_texts` texts.
    """
    first = waiting[0]
    ordered = sorted(waiting, key=lambda text: text.tokens)  # stable: texts of equal length stay in order of arrival
    low = ordered.index(first)
    high = low + 1
    tokens = first.tokens
    while high - low < max_texts:
        longest = ordered[high - 1].tokens
        shorter = ordered[low - 1].tokens if low else None
        longer = ordered[high].tokens if high < len(ordered) else None
        # The padding that the next shorter or longer text would add.
        below = None if shorter is None else longest - shorter
        above = None if longer is None else (longer - longest) * (high - low)
        if below is None and above is None:
            break
        goes_up = below is None or (above is not None and above <= below)
        added = longer if goes_up else shorter
        assert added is not None
        padded = (high - low + 1) * max(longest, added)
        if padded > max_tokens or (padded > FREE_TOKENS and tokens + added < LEAST_TOKENS_SHARE * padded):
            break
        tokens += added
        low, high = (low, high + 1) if goes_up else (low - 1, high)
    return ordered[low:high]
