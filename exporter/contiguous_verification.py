"""Verification of the contiguous form: prompts and the steps after them against uncached PyTorch passes."""

from pathlib import Path

import numpy as np

from sharp.exporter.contiguous_session import ContiguousSession
from sharp.exporter.continuation import Append
from sharp.exporter.decoder import Decoder
from sharp.exporter.perplexity import LOGITS_ROWS
from sharp.exporter.torch_answer import torch_answer, torch_logits
from sharp.exporter.verification import Answer, Floats, Tokens

# (name, sequences, new tokens of every step)
CASES: dict[str, tuple[int, tuple[int, ...]]] = {
    "first token": (1, (1,)),
    "prompt": (1, (45,)),
    "prompt and decode": (1, (33, 1, 1)),
    "prompt in two chunks": (1, (21, 19)),
    "batch of 3": (3, (18, 1, 7)),
}


class ContiguousVerifier:
    """See `Verifier`."""

    cases = tuple(CASES)
    writes_text = True
    text_step = LOGITS_ROWS

    def __init__(self, decoder: Decoder) -> None:
        self.model = decoder
        self.config = decoder.config
        generator = np.random.default_rng(0)
        self.sequences = {
            name: generator.integers(0, decoder.config.vocab_size, (sequences, sum(steps)))
            for name, (sequences, steps) in CASES.items()
        }

    def expected(self, case: str) -> list[Answer]:
        """See `Verifier`."""
        return [torch_answer(self.model, tokens) for tokens in self.sequences[case]]

    def open(self, folder: Path, *, kernels: bool) -> ContiguousSession:
        """See `Verifier`."""
        return ContiguousSession(folder, kernels=kernels)

    def run(self, session: ContiguousSession, case: str) -> list[Answer]:
        """See `Verifier`."""
        sequences, steps = CASES[case]
        session.reset(sequences)
        borders = np.cumsum(steps)[:-1]
        read = [session.step(tokens) for tokens in np.split(self.sequences[case], borders, axis=1)]
        logits = np.concatenate([part for part, _ in read], axis=1)  # [sequences, tokens, vocab]
        entropies = np.concatenate([stats[..., 0] for _, stats in read], axis=3)  # [layers, sequences, q_heads, tokens]
        return [Answer(logits[i], entropies[:, i].swapaxes(1, 2)) for i in range(sequences)]

    def begin(self, session: ContiguousSession, tokens: int) -> Append:
        """See `Verifier`."""
        del tokens  # the past grows as it must
        session.reset(1)

        def append(new: Tokens) -> Floats:
            logits: Floats = session.step(new[None])[0][0]
            return logits

        return append

    def logits(self, tokens: Tokens) -> Floats:
        """See `Verifier`."""
        return torch_logits(self.model, tokens)
