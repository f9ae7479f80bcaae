"""`TensorEngine`: computes the rows of requests together where they are of one length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.backends.tensors import TensorBackend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.row_engine import ComputedBatch, RowEngine, WaitingRow

Row = WaitingRow[TensorRequest]


class TensorEngine(RowEngine[TensorRequest]):
    """Turns the rows of a model's own tensors into those of its output. Nothing is padded."""

    def __init__(self, backend: TensorBackend, manifest: Manifest, config: EngineConfig) -> None:
        super().__init__(config, config.max_batch_tokens)
        self._backend = backend
        self._windows = np.array(manifest.windows, np.int64) if manifest.windows else None

    def _choose(self, waiting: Sequence[Row]) -> list[Row]:
        tokens = waiting[0].tokens
        alike = [row for row in waiting if row.tokens == tokens]
        return alike[: max(1, min(self._config.max_sequences, self.batch_tokens // tokens))]

    def _compute(self, batch: list[Row], *, collect_stats: bool) -> ComputedBatch:
        first = batch[0].request.request.inputs
        inputs = {name: np.stack([row.request.request.inputs[name][row.index] for row in batch]) for name in first}
        output, stats = self._backend.run(inputs, collect_stats=collect_stats)
        attention = None if stats is None else attention_rows(stats, batch[0].tokens, self._windows)
        return ComputedBatch(output, 0, attention)


def attention_rows(stats: NDArray[np.float32], tokens: int, windows: NDArray[np.int64] | None) -> AttentionRows:
    """Statistics [layers, batch, q_heads, queries, 4 or 5]; the last query of a row sees all of its tokens."""
    layers, batch, heads, queries, columns = stats.shape
    rows = stats.swapaxes(2, 3).reshape(layers, batch * queries, heads, columns)
    return AttentionRows(rows, np.tile(np.arange(tokens - queries, tokens), batch), windows)
