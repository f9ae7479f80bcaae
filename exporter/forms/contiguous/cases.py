"""Verification of the contiguous form: prompts and the steps after them against uncached PyTorch passes."""

from pathlib import Path

import numpy as np

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.exporter.verification.comparison import CaseOutputs, Floats, Shape, Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.exporter.verification.perplexity import LOGITS_ROWS
from sharp.exporter.verification.torch_outputs import torch_case_outputs, torch_logits

# All sequences of a batch are of one length.
CASES = {
    "first token": (Shape(1),),
    "prompt": (Shape(45),),
    "prompt and decode": (Shape(1, context=33),),
    "prompt in two chunks": (Shape(19, context=21),),
    "batch of 3": (Shape(7, context=18),) * 3,
    "long context": (Shape(3, context=290),),
}


class ContiguousVerifier:
    """See `Verifier`."""

    writes_text = True
    text_step = LOGITS_ROWS

    def __init__(self, decoder: Decoder) -> None:
        self.model = decoder
        self.config = decoder.config
        generator = np.random.default_rng(0)
        longest = decoder.config.max_context
        self.cases = {name: tuple(one.within(longest) for one in shapes) for name, shapes in CASES.items()}
        self.sequences = {
            name: generator.integers(0, decoder.config.vocab_size, (len(shapes), shapes[0].context + shapes[0].tokens))
            for name, shapes in self.cases.items()
        }

    def expected(self, case: str) -> list[CaseOutputs]:
        """See `Verifier`."""
        return [torch_case_outputs(self.model, tokens) for tokens in self.sequences[case]]

    def open(self, folder: Path, *, kernels: bool) -> ContiguousSession:
        """See `Verifier`."""
        return ContiguousSession(folder, kernels=kernels)

    def run(self, session: ContiguousSession, case: str) -> list[CaseOutputs]:
        """See `Verifier`."""
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
