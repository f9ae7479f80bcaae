"""Verification of the paged form.

Every case has two steps for all its sequences together. The first step reads the contexts into the cache, the second
reads the new tokens. Each row is compared with one uncached PyTorch pass over the whole sequence.
"""

from pathlib import Path

import numpy as np

from sharp.core.manifest import Cache
from sharp.exporter.forms.paged.session import PagedSession
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.verification.comparison import CaseOutputs, CaseShape, Floats, Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.exporter.verification.perplexity import LOGITS_ROWS
from sharp.exporter.verification.torch_outputs import torch_case_outputs, torch_logits

CASES = {
    "first token": (CaseShape(1),),
    "prompt": (CaseShape(45),),
    "decode": (CaseShape(1, context=33),),
    "prompt in two chunks": (CaseShape(19, context=21),),
    "decode, batch of 3": (CaseShape(1, context=15), CaseShape(1, context=16), CaseShape(1, context=38)),
    "prompt joins decode": (CaseShape(18), CaseShape(1, context=40), CaseShape(13, context=7)),
    "long context": (CaseShape(3, context=290),),
}


class PagedVerifier:
    """The `Verifier` of a decoder in its paged form."""

    writes_text = True
    text_step = LOGITS_ROWS

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.cache = cache
        self.model = decoder
        self.config = decoder.config
        generator = np.random.default_rng(0)
        longest = decoder.config.max_context
        self.cases = {name: tuple(shape.within(longest) for shape in shapes) for name, shapes in CASES.items()}
        self.sequences = {
            name: [generator.integers(0, decoder.config.vocab_size, shape.context + shape.tokens) for shape in shapes]
            for name, shapes in self.cases.items()
        }

    def expected(self, case: str) -> list[CaseOutputs]:
        """Compute each sequence of the case in PyTorch, in one uncached pass; one result per sequence."""
        return [torch_case_outputs(self.model, tokens) for tokens in self.sequences[case]]

    def open(self, folder: Path, *, kernels: bool) -> PagedSession:
        """Open the written model in ONNX Runtime; `kernels` says whether Sharp's library computes attention."""
        return PagedSession(folder, self.config, self.cache, kernels=kernels)

    def run(self, session: PagedSession, case: str) -> list[CaseOutputs]:
        """Compute the sequences of the case with the written model: first their contexts, then the other tokens."""
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
                np.concatenate([outputs.logits for outputs in part]),
                np.concatenate([outputs.entropy for outputs in part], axis=1),
                session.cached("key", sequence),
                session.cached("value", sequence),
            )
            for sequence, part in enumerate(parts)
        ]

    def begin(self, session: PagedSession, tokens: int) -> Append:
        """Start a sequence of at most `tokens`, and drop all others of `session`; return a function that appends to it.

        The function takes int64 [new tokens] and returns the logits of all of them, [new tokens, vocab].
        """
        session.reset(1, tokens)

        def append(new: Tokens) -> Floats:
            """Append tokens to the sequence and return their logits [tokens, vocab]."""
            (logits,), _ = session.step([new])
            return logits

        return append

    def logits(self, tokens: Tokens) -> Floats:
        """Compute logits [tokens, vocab] of a sequence in PyTorch."""
        return torch_logits(self.model, tokens)
