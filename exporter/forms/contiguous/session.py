"""A folder exported with `--cache contiguous`, in ONNX Runtime."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sharp.exporter.forms.session import open_session
from sharp.exporter.forms.uncached.model import COLLECT_STATS
from sharp.exporter.verification.comparison import Floats

Tokens = NDArray[np.int64]


class ContiguousSession:
    """Sequences of one length that grow together; see `open_session` for the arguments."""

    def __init__(self, folder: Path, *, kernels: bool, threads: int = 0) -> None:
        self.session = open_session(folder, kernels=kernels, threads=threads)
        self.past_shapes = {
            value.name: value.shape for value in self.session.get_inputs() if value.name.startswith("past_key_values.")
        }
        self.reset(0)

    def reset(self, sequences: int) -> None:
        """Forget everything; start so many empty sequences."""
        self.pasts: dict[str, Floats] = {
            name: np.zeros((sequences, heads, 0, dim), np.float32)
            for name, (_, heads, _, dim) in self.past_shapes.items()
        }

    def step(self, tokens: Tokens) -> tuple[Floats, Floats]:
        """Append `tokens` [sequences, tokens].

        Returns their logits [sequences, tokens, vocab] and stats [layers, sequences, q_heads, tokens, columns].
        """
        presents = [name.replace("past_key_values.", "present.") for name in self.pasts]
        feeds = {"input_ids": tokens, COLLECT_STATS: np.array(True), **self.pasts}
        logits, stats, *updated = self.session.run(["logits", "stats", *presents], feeds)
        self.pasts = dict(zip(self.pasts, updated, strict=True))
        return logits, stats

    def cached(self, kind: str) -> tuple[Floats, ...]:
        """What every cache holds, float32 [sequences, tokens, kv_heads, dim]; `kind` is key or value."""
        return tuple(past.swapaxes(1, 2) for name, past in self.pasts.items() if name.endswith(f".{kind}"))

    def generate(self, prompt: Tokens, tokens: int) -> Tokens:
        """Greedy continuation [sequences, tokens] of `prompt` [sequences, tokens]."""
        self.reset(len(prompt))
        generated: list[Tokens] = []
        following = prompt
        for _ in range(tokens):
            logits, _ = self.step(following)
            following = logits[:, -1:].argmax(-1)
            generated.append(following)
        return np.concatenate(generated, axis=1)
