"""The session that runs a folder exported with `--cache contiguous` in ONNX Runtime."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.exporter.forms.session import open_session
from sharp.exporter.forms.uncached.model import COLLECT_STATS
from sharp.exporter.verification.comparison import Floats

Tokens = NDArray[np.int64]


class ContiguousSession:
    """A batch of sequences of the same length, which grow together. Call `reset` before the first `step`.

    With `kernels` the attention runs in Sharp's library; without, ONNX Runtime inlines the function body. `threads` is
    the number of CPU threads (0: all).
    """

    def __init__(self, folder: Path, *, kernels: bool, threads: int = 0) -> None:
        self.session = open_session(folder, kernels=kernels, threads=threads)
        self.past_shapes = {
            value.name: value.shape for value in self.session.get_inputs() if value.name.startswith("past_key_values.")
        }
        self.reset(0)

    def reset(self, sequences: int) -> None:
        """Drop all sequences and start a number of empty sequences."""
        self.pasts: dict[str, Floats] = {
            name: np.zeros((sequences, heads, 0, dim), np.float32)
            for name, (_, heads, _, dim) in self.past_shapes.items()
        }

    def step(self, tokens: Tokens) -> tuple[Floats, Floats]:
        """Append `tokens` int64 [sequences, tokens] to the sequences, as many as `reset` started.

        Returns:
            Logits [sequences, tokens, vocab] and stats [layers, sequences, q_heads, tokens, columns] of these tokens.
        """
        presents = [name.replace("past_key_values.", "present.") for name in self.pasts]
        feeds = {"input_ids": tokens, COLLECT_STATS: np.array(True), **self.pasts}
        logits, stats, *updated = self.session.run(["logits", "stats", *presents], feeds)
        self.pasts = dict(zip(self.pasts, updated, strict=True))
        return logits, stats

    def cached(self, kind: str) -> tuple[Floats, ...]:
        """Return the keys or values of every cache, float32 [sequences, tokens, kv_heads, dim].

        `kind` is `key` or `value`.
        """
        return tuple(past.swapaxes(1, 2) for name, past in self.pasts.items() if name.endswith(f".{kind}"))

    def generate(self, prompt: Tokens, tokens: int) -> Tokens:
        """Return the greedy continuation int64 [sequences, tokens] of `prompt` int64 [sequences, prompt tokens].

        Earlier sequences are dropped. Tokens after an end-of-text token are generated, too; `tokens` must be above 0.
        """
        self.reset(len(prompt))
        generated: list[Tokens] = []
        following = prompt
        for _ in range(tokens):
            logits, _ = self.step(following)
            following = logits[:, -1:].argmax(-1)
            generated.append(following)
        return np.concatenate(generated, axis=1)
