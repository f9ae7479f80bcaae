"""The session that runs a folder exported with `--cache paged` in ONNX Runtime, for verification."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from sharp.core.manifest import Cache
from sharp.exporter.forms.session import open_session
from sharp.exporter.verification.comparison import Floats
from sharp.models.config import SharpConfig
from sharp.plugins.op.cache_tensors import cache_tensors


class PagedSession:
    """Sequences that grow step by step in the paged cache of this session. Call `reset` before the first `step`.

    With `kernels` the attention runs in Sharp's library; without, ONNX Runtime inlines the function body. `threads` is
    the number of CPU threads (0: all). `config` and `cache` are those of the model in `folder`.
    """

    def __init__(self, folder: Path, config: SharpConfig, cache: Cache, *, kernels: bool, threads: int = 0) -> None:
        self.block_size = cache.block_size
        self.tensors = cache_tensors(cache, config.layers, config.kv_heads, config.head_dim, config.value_dim)
        self.session = open_session(folder, kernels=kernels, threads=threads)
        self.reset(0, 0)

    def reset(self, sequences: int, tokens: int) -> None:
        """Drop all sequences and make room for a number of sequences of up to `tokens` tokens each."""
        per_sequence = -(-tokens // self.block_size)
        blocks = max(1, sequences * per_sequence)
        self.lengths = [0] * sequences
        # Neighbouring blocks belong to different sequences, so that a wrong block table changes the result.
        self.table = np.arange(sequences * per_sequence, dtype=np.int32).reshape(per_sequence, sequences).T.copy()
        self.caches = {tensor.name: tensor.make(blocks) for tensor in self.tensors}

    def step(self, tokens: Sequence[NDArray[np.int64]]) -> tuple[list[Floats], list[Floats]]:
        """Append `tokens[s]`, int64 [n] of none, one or many tokens, to sequence s; one sequence must have tokens.

        No sequence may grow beyond the tokens of `reset`.

        Returns:
            For every sequence with tokens, in the order of the sequences, logits [tokens, vocab] and stats
            [layers, tokens, q_heads, 4 or 5].
        """
        rows = [sequence for sequence, new in enumerate(tokens) if len(new)]
        counts = [len(tokens[row]) for row in rows]
        starts = [self.lengths[row] for row in rows]
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [
            self.table[row][place // self.block_size] * self.block_size + place % self.block_size
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
        }
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        names = ["logits", "stats", *(tensor.updated_name for tensor in self.tensors)]
        # Caches are OrtValues, because numpy has no bfloat16.
        outputs = self.session.run_with_ort_values(names, values | self.caches)
        logits, stats = (output.numpy() for output in outputs[:2])
        self.caches = dict(zip(self.caches, outputs[2:], strict=True))
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        borders = np.cumsum(counts)[:-1]
        return np.split(logits, borders), np.split(stats, borders, axis=1)

    def cached(self, kind: str, sequence: int) -> tuple[Floats, ...]:
        """Return the keys or values of a sequence in every cache, float32 [tokens, kv_heads, dim].

        `kind` is `key` or `value`. Numbers of a cache with scales are multiplied by their scales.
        """
        blocks, length = self.table[sequence], self.lengths[sequence]
        order = (
            (0, 3, 1, 2) if kind == "key" else (0, 2, 1, 3)
        )  # keys lie [block, head, dim, place], values [.., place, dim]
        found: list[Floats] = []
        for name, tensor in self.caches.items():
            if name.startswith(f"{kind}_cache."):
                stored = _numbers(tensor)[blocks]
                if (scale := self.caches.get(name.replace("_cache", "_scale"))) is not None:
                    stored = stored * scale.numpy()[blocks][:, :, None, None]
                tokens: Floats = stored.transpose(order).reshape(-1, *np.take(stored.shape, order)[2:])
                found.append(tokens[:length])
        return tuple(found)


def _numbers(cache: Any) -> Floats:
    """Return the content of an OrtValue as float32. DLPack does not support fp8, whose bytes numpy reads."""
    if cache.data_type() == "tensor(float8e4m3fn)":
        held = torch.from_numpy(cache.numpy()).view(torch.float8_e4m3fn)
    else:
        held = from_dlpack(cache._ortvalue.to_dlpack())
    numbers: Floats = held.float().numpy()
    return numbers
