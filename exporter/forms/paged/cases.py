"""Verification of the paged form.

Every case runs contexts into the cache first and new tokens after it, all sequences of the case in one step, and
compares each row with one uncached PyTorch pass over the whole sequence.
"""

from pathlib import Path

import numpy as np

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.forms.paged.session import PagedSession
from sharp.exporter.verification.comparison import CaseOutputs, Floats, Shape, Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.exporter.verification.perplexity import LOGITS_ROWS
from sharp.exporter.verification.torch_outputs import torch_case_outputs, torch_logits
from sharp.plugins.manifest import Cache

CASES = {
    "first token": (Shape(1),),
    "prompt": (Shape(45),),
    "decode": (Shape(1, context=33),),
    "prompt in two chunks": (Shape(19, context=21),),
    "decode, batch of 3": (Shape(1, context=15), Shape(1, context=16), Shape(1, context=38)),
    "prompt joins decode": (Shape(18), Shape(1, context=40), Shape(13, context=7)),
    "long context": (Shape(3, context=290),),
}


class PagedVerifier:
    """See `Verifier`."""

    writes_text = True
    text_step = LOGITS_ROWS

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.cache = cache
        self.model = decoder
        self.config = decoder.config
        generator = np.random.default_rng(0)
        longest = decoder.config.max_context
        self.cases = {name: tuple(one.within(longest) for one in shapes) for name, shapes in CASES.items()}
        self.sequences = {
            name: [generator.integers(0, decoder.config.vocab_size, one.context + one.tokens) for one in shapes]
            for name, shapes in self.cases.items()
        }

    def expected(self, case: str) -> list[CaseOutputs]:
        """See `Verifier`."""
        return [torch_case_outputs(self.model, tokens) for tokens in self.sequences[case]]

    def open(self, folder: Path, *, kernels: bool) -> PagedSession:
        """See `Verifier`."""
        return PagedSession(folder, self.config, self.cache, kernels=kernels)

    def run(self, session: PagedSession, case: str) -> list[CaseOutputs]:
        """See `Verifier`."""
        sequences = self.sequences[case]
        session.reset(len(sequences), max(len(tokens) for tokens in sequences))
        parts: list[list[CaseOutputs]] = [[] for _ in sequences]
        borders = [shape.context for shape in self.cases[case]]
        for step in (
            [tokens[:border] for tokens, border in zip(sequences, borders, strict=True)],
            [tokens[border:] for tokens, border in zip(sequences, borders, strict=True)],
        ):
            read = [part for part, tokens in zip(parts, step, strict=True) if len(tokens)]
            if read:
                for part, logits, stats in zip(read, *session.step(step), strict=True):
                    part.append(CaseOutputs(logits, stats[..., 0]))
        return [
            CaseOutputs(
                np.concatenate([one.logits for one in part]),
                np.concatenate([one.entropy for one in part], axis=1),
                session.cached("key", sequence),
                session.cached("value", sequence),
            )
            for sequence, part in enumerate(parts)
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
