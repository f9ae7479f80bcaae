"""Verification of the contiguous form, which compares prompts and later steps with uncached PyTorch passes."""

from pathlib import Path

import numpy as np

from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.verification.comparison import CaseOutputs, CaseShape, Floats, Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.exporter.verification.perplexity import LOGITS_ROWS
from sharp.exporter.verification.torch_outputs import torch_case_outputs, torch_logits

# All sequences of a batch have the same length.
CASES = {
    "first token": (CaseShape(1),),
    "prompt": (CaseShape(45),),
    "prompt and decode": (CaseShape(1, context=33),),
    "prompt in two chunks": (CaseShape(19, context=21),),
    "batch of 3": (CaseShape(7, context=18),) * 3,
    "long context": (CaseShape(3, context=290),),
}


class ContiguousVerifier:
    """The `Verifier` of a decoder in its contiguous form."""

    writes_text = True
    text_step = LOGITS_ROWS

    def __init__(self, decoder: Decoder) -> None:
        self.model = decoder
        self.config = decoder.config
        generator = np.random.default_rng(0)
        longest = decoder.config.max_context
        self.cases = {name: tuple(shape.within(longest) for shape in shapes) for name, shapes in CASES.items()}
        self.sequences = {
            name: generator.integers(0, decoder.config.vocab_size, (len(shapes), shapes[0].context + shapes[0].tokens))
            for name, shapes in self.cases.items()
        }

    def expected(self, case: str) -> list[CaseOutputs]:
        """Compute each sequence of the case in PyTorch, in one uncached pass; one result per sequence."""
        return [torch_case_outputs(self.model, tokens) for tokens in self.sequences[case]]

    def open(self, folder: Path, *, kernels: bool) -> ContiguousSession:
        """Open the written model in ONNX Runtime; `kernels` says whether Sharp's library computes attention."""
        return ContiguousSession(folder, kernels=kernels)

    def run(self, session: ContiguousSession, case: str) -> list[CaseOutputs]:
        """Compute the sequences of the case with the written model: first their contexts, then the other tokens."""
        session.reset(len(self.cases[case]))
        steps = np.split(self.sequences[case], [self.cases[case][0].context], axis=1)
        read = [session.step(tokens) for tokens in steps if tokens.shape[1]]
        logits = np.concatenate([part for part, _ in read], axis=1)  # [sequences, tokens, vocab]
        entropies = np.concatenate([stats[..., 0] for _, stats in read], axis=3)  # [layers, sequences, q_heads, tokens]
        keys, values = session.cached("key"), session.cached("value")
        return [
            CaseOutputs(
                logits[i],
                entropies[:, i].swapaxes(1, 2),
                tuple(cache[i] for cache in keys),
                tuple(cache[i] for cache in values),
            )
            for i in range(len(self.cases[case]))
        ]

    def begin(self, session: ContiguousSession, tokens: int) -> Append:
        """Start one sequence, and drop all others of `session`; return a function that appends tokens to it.

        The function takes int64 [new tokens] and returns the logits of all of them, [new tokens, vocab].
        """
        del tokens  # a past needs no room in advance
        session.reset(1)

        def append(new: Tokens) -> Floats:
            """Append tokens to the sequence and return their logits [tokens, vocab]."""
            logits: Floats = session.step(new[None])[0][0]
            return logits

        return append

    def logits(self, tokens: Tokens) -> Floats:
        """Compute logits [tokens, vocab] of a sequence in PyTorch."""
        return torch_logits(self.model, tokens)
