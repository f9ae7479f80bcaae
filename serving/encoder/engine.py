"""`EncoderEngine`: encodes the texts of requests together, one batch at a time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest, Pooling
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.backends.encoder import EncoderBackend, EncoderBatch
from sharp.serving.config import EngineConfig
from sharp.serving.encoder.batching import choose
from sharp.serving.encoder.pooling import pool
from sharp.serving.engine.row_engine import ComputedBatch, RowEngine, WaitingRow

# Of a processor larger batches are slower: with 384 channels 512 tokens took 0.91 of the time of 2048, as what is
# computed between two products stays in its cache.
CPU_BATCH_TOKENS = 512

WaitingText = WaitingRow[EncodeRequest]


class EncoderEngine(RowEngine[EncodeRequest]):
    """Turns texts into rows of numbers: embeddings before they are normalized, or logits of labels."""

    def __init__(self, backend: EncoderBackend, manifest: Manifest, pooling: Pooling, config: EngineConfig) -> None:
        most = config.max_batch_tokens
        super().__init__(config, min(most, CPU_BATCH_TOKENS) if backend.device == "cpu" else most)
        self._backend = backend
        self._pooling = pooling
        self._windows = np.array(manifest.windows, np.int64) if manifest.windows else None

    def _choose(self, waiting: Sequence[WaitingText]) -> list[WaitingText]:
        return choose(waiting, self.batch_tokens, self._config.max_sequences)

    def _compute(self, batch: list[WaitingText], *, collect_stats: bool) -> ComputedBatch:
        arrays = pack(batch, collect_stats=collect_stats)
        output = self._backend.run(arrays)
        lengths = [text.tokens for text in batch]
        attention = None
        if output.stats is not None:
            attention = attention_rows(output.stats, arrays.attention_mask, self._windows)
        padding = arrays.input_ids.size - sum(lengths)
        return ComputedBatch(pool(output.values, lengths, self._pooling), padding, attention)


def pack(texts: list[WaitingText], *, collect_stats: bool) -> EncoderBatch:
    """The arrays of a batch, with padding behind every text."""
    shape = len(texts), max(text.tokens for text in texts)
    arrays = [np.zeros(shape, np.int64) for _ in range(3)]
    for row, text in enumerate(texts):
        tokens = text.request.request.tokens[text.index]
        for array, values in zip(arrays, (tokens.token_ids, 1, tokens.token_types or 0), strict=True):
            array[row, : text.tokens] = values
    input_ids, mask, token_types = arrays
    return EncoderBatch(input_ids, mask, token_types, collect_stats)


def attention_rows(
    stats: NDArray[np.float32], mask: NDArray[np.int64], windows: NDArray[np.int64] | None
) -> AttentionRows:
    """Statistics [layers, batch, q_heads, length, 4 or 5] without those of padding; a token sees all of its text."""
    counts = mask.astype(bool)
    lengths = np.broadcast_to(mask.sum(1, keepdims=True), mask.shape)[counts]
    return AttentionRows(stats.swapaxes(2, 3)[:, counts], lengths - 1, windows)
