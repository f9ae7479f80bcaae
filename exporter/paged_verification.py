"""Verification of the paged form.

Every case runs contexts into the cache first and new tokens after it, all sequences of the case in one step, and
compares each row with one uncached PyTorch pass over the whole sequence.
"""

from pathlib import Path

import numpy as np

from sharp.exporter.continuation import Append
from sharp.exporter.decoder import Decoder
from sharp.exporter.paged_session import PagedSession
from sharp.exporter.perplexity import LOGITS_ROWS
from sharp.exporter.torch_answer import torch_answer, torch_logits
from sharp.exporter.verification import Answer, Floats, Tokens
from sharp.plugins.manifest import Cache

# (name, (context, new tokens) of every sequence)
CASES: dict[str, tuple[tuple[int, int], ...]] = {
    "first token": ((0, 1),),
    "prompt": ((0, 45),),
    "decode": ((33, 1),),
    "prompt in two chunks": ((21, 19),),
    "decode, batch of 3": ((15, 1), (16, 1), (38, 1)),
    "prompt joins decode": ((0, 18), (40, 1), (7, 13)),
}


class PagedVerifier:
    """See `Verifier`."""

    cases = tuple(CASES)
    writes_text = True
    text_step = LOGITS_ROWS

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.cache = cache
        self.model = decoder
        self.config = decoder.config
        generator = np.random.default_rng(0)
        self.sequences = {
            name: [generator.integers(0, decoder.config.vocab_size, sum(lengths)) for lengths in case]
            for name, case in CASES.items()
        }

    def expected(self, case: str) -> list[Answer]:
        """See `Verifier`."""
        return [torch_answer(self.model, tokens) for tokens in self.sequences[case]]

    def open(self, folder: Path, *, kernels: bool) -> PagedSession:
        """See `Verifier`."""
        return PagedSession(folder, self.config, self.cache, kernels=kernels)

    def run(self, session: PagedSession, case: str) -> list[Answer]:
        """See `Verifier`."""
        sequences = self.sequences[case]
        session.reset(len(sequences), max(len(tokens) for tokens in sequences))
        parts: list[list[Answer]] = [[] for _ in sequences]
        borders = [context for context, _ in CASES[case]]
        for step in (
            [tokens[:border] for tokens, border in zip(sequences, borders, strict=True)],
            [tokens[border:] for tokens, border in zip(sequences, borders, strict=True)],
        ):
            read = [part for part, tokens in zip(parts, step, strict=True) if len(tokens)]
            if read:
                for part, logits, stats in zip(read, *session.step(step), strict=True):
                    part.append(Answer(logits, stats[..., 0]))
        return [
            Answer(
                np.concatenate([one.logits for one in part]),
                np.concatenate([one.entropy for one in part], axis=1),
            )
            for part in parts
        ]

    def begin(self, session: PagedSession, tokens: int) -> Append:
        """See `Verifier`."""
        session.reset(1, tokens)

        def append(new: Tokens) -> Floats:
            (logits,), _ = session.step([new])
            return logits

        return append

    def logits(self, tokens: Tokens) -> Floats:
        """See `Verifier`."""
        return torch_logits(self.model, tokens)
