"""`TensorEngine`: computes rows of requests together if they have the same length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.backends.rows import RowBackend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.row_engine import ComputedBatch, RowEngine, WaitingRow

Row = WaitingRow[TensorRequest]


class TensorEngine(RowEngine[TensorRequest]):
    """An engine that turns rows of a model's input tensors into rows of its output. Nothing is padded."""

    def __init__(self, backend: RowBackend, manifest: Manifest, config: EngineConfig) -> None:
        super().__init__(backend, manifest, config, config.max_batch_tokens)

    def _choose(self, waiting: Sequence[Row]) -> list[Row]:
        """Return the waiting rows of the first one's size, as many as fit into a batch."""
        tokens = waiting[0].tokens
        alike = [row for row in waiting if row.tokens == tokens]
        return alike[: max(1, min(self._config.max_sequences, self.batch_tokens // tokens))]

    def _compute(self, batch: list[Row], *, collect_stats: bool) -> ComputedBatch:
        """Run one batch of rows and return their outputs and attention statistics; there is no padding."""
        first = batch[0].request.request.inputs
        inputs = {name: np.stack([row.request.request.inputs[name][row.index] for row in batch]) for name in first}
        output = self._backend.run(inputs, collect_stats=collect_stats)
        attention = None if output.stats is None else attention_rows(output.stats, batch[0].tokens, self._windows)
        return ComputedBatch(output.values, 0, attention)


def attention_rows(stats: NDArray[np.float32], tokens: int, windows: NDArray[np.int64] | None) -> AttentionRows:
    """Return the statistics [layers, batch, q_heads, queries, 4 or 5] of a batch as rows, queries of one row together.

    A row has `tokens` tokens, of which the queries are the last. `windows` int64 [layers] is the maximum number of keys
    that a query of the layer sees; None if all layers see all keys.
    """
    layers, batch, heads, queries, columns = stats.shape
    rows = stats.swapaxes(2, 3).reshape(layers, batch * queries, heads, columns)
    return AttentionRows(rows, np.tile(np.arange(tokens - queries, tokens), batch), windows)
