"""A model folder in ONNX Runtime, one cache block after the other: what verification needs and no more."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.exporter.paged_model import BLOCK_SIZE
from sharp.exporter.session import open_session
from sharp.exporter.verification import Floats
from sharp.models.config import SharpConfig


class PagedSession:
    """Sequences that grow step by step in a cache of their own.

    With `kernels` the attention runs in Sharp's library; without, ONNX Runtime inlines the function body.
    """

    def __init__(self, folder: Path, config: SharpConfig, *, kernels: bool) -> None:
        self.config = config
        self.session = open_session(folder, kernels=kernels)
        self.reset(0, 0)

    def reset(self, sequences: int, tokens: int) -> None:
        """Forget everything; make room for `sequences` of up to `tokens` tokens, in interleaved blocks."""
        config = self.config
        per_sequence = -(-tokens // BLOCK_SIZE)
        blocks = max(1, sequences * per_sequence)
        self.lengths = [0] * sequences
        # Neighbouring blocks belong to different sequences, so a wrong table shows.
        self.table = np.arange(sequences * per_sequence, dtype=np.int32).reshape(per_sequence, sequences).T.copy()
        key_shape = (blocks, config.kv_heads, config.head_dim, BLOCK_SIZE)
        value_shape = (blocks, config.kv_heads, BLOCK_SIZE, config.head_dim)
        self.caches: dict[str, Floats] = {}
        for layer in range(config.layers):
            self.caches[f"key_cache.{layer}"] = np.zeros(key_shape, np.float32)
            self.caches[f"value_cache.{layer}"] = np.zeros(value_shape, np.float32)

    def step(self, tokens: Sequence[NDArray[np.int64]]) -> tuple[list[Floats], list[Floats]]:
        """Append `tokens[s]` (none, one or many) to sequence s.

        Returns, for every sequence with tokens, the logits [tokens, vocab] and stats [layers, tokens, q_heads, 4].
        """
        rows = [sequence for sequence, new in enumerate(tokens) if len(new)]
        counts = [len(tokens[row]) for row in rows]
        starts = [self.lengths[row] for row in rows]
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [
            self.table[row][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            for row, place in zip(rows, positions, strict=True)
        ]
        total = sum(counts)
        feeds = {
            "input_ids": np.concatenate([tokens[row] for row in rows]),
            "positions": np.concatenate(positions).astype(np.int64),
            "slot_mapping": np.concatenate(slots).astype(np.int32),
            "block_table": self.table[rows],
            "query_start": np.cumsum([0, *counts]).astype(np.int32),
            "context_lens": np.array(starts, np.int32),
            "collect_stats": np.array(True),
            "logits_indices": np.arange(total, dtype=np.int64),
            **self.caches,
        }
        names = ["logits", "stats", *(name.replace("_cache.", "_cache_out.") for name in self.caches)]
        logits, stats, *caches = self.session.run(names, feeds)
        self.caches = dict(zip(self.caches, caches, strict=True))
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        borders = np.cumsum(counts)[:-1]
        return np.split(logits, borders), np.split(stats, borders, axis=1)
