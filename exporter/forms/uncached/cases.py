"""Verification of the form without a cache: whole batches against PyTorch, without the rows that are padding."""

from pathlib import Path

import numpy as np
import torch

from sharp.exporter.checkpoints.uncached_model import ANY_NUMBER_OF_ITEMS, UncachedDecoder, UncachedModel
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.exporter.verification.comparison import CaseOutputs, Floats, Shape, Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.exporter.verification.torch_outputs import torch_logits
from sharp.plugins.ops.torch_normalizers import entropy

# A batch is of one length; in an encoder's there is padding.
CASES = {
    "one": (Shape(1),),
    "one of 45": (Shape(45),),
    "batch of 3": (Shape(19),) * 3,
    "batch of 7": (Shape(2),) * 7,
    "long one": (Shape(300),),
}


class UncachedVerifier:
    """See `Verifier`; all rows of a case are one output."""

    text_step = ANY_NUMBER_OF_ITEMS  # without a cache every step reads all tokens before it again

    def __init__(self, model: UncachedModel) -> None:
        self.model = model
        self.config = model.config
        self.writes_text = isinstance(model, UncachedDecoder)
        generator = torch.Generator().manual_seed(0)
        longest = model.config.max_context
        self.cases = {name: tuple(one.within(longest) for one in shapes) for name, shapes in CASES.items()}
        self.inputs = {
            name: model.random_inputs(len(shapes), shapes[0].tokens, generator) for name, shapes in self.cases.items()
        }

    @torch.no_grad()
    def expected(self, case: str) -> list[CaseOutputs]:
        """See `Verifier`."""
        inputs = self.inputs[case]
        double = next(self.model.parameters()).dtype == torch.float64
        output, weights = self.model.eager(
            *(one.double() if double and one.is_floating_point() else one for one in inputs)
        )
        return self._case_outputs(
            inputs, output.numpy(), self.model.stack([entropy(layer) for layer in weights]).numpy()
        )

    def open(self, folder: Path, *, kernels: bool) -> UncachedSession:
        """See `Verifier`."""
        return UncachedSession(folder, kernels=kernels)

    def run(self, session: UncachedSession, case: str) -> list[CaseOutputs]:
        """See `Verifier`."""
        inputs = self.inputs[case]
        output, stats = session.run_with_stats([tensor.numpy() for tensor in inputs])
        return self._case_outputs(inputs, output, stats[..., 0])

    def begin(self, session: UncachedSession, tokens: int) -> Append:
        """See `Verifier`; every step computes the whole sequence anew."""
        del tokens
        sequence = np.zeros(0, np.int64)

        def append(new: Tokens) -> Floats:
            nonlocal sequence
            sequence = np.concatenate([sequence, new])
            logits: Floats = session.run([sequence[None]])[0, -len(new) :]
            return logits

        return append

    def logits(self, tokens: Tokens) -> Floats:
        """See `Verifier`."""
        assert isinstance(self.model, UncachedDecoder)
        return torch_logits(self.model.decoder, tokens)

    def _case_outputs(self, inputs: tuple[torch.Tensor, ...], output: Floats, entropies: Floats) -> list[CaseOutputs]:
        """The rows that count of an output and entropies [layers, batch, q_heads, queries]."""
        mask = self.model.attention_mask(*inputs)
        if mask is None:  # all rows count, however many an output has for its queries
            rows = entropies.swapaxes(2, 3).reshape(len(entropies), -1, entropies.shape[2])
            return [CaseOutputs(output.reshape(-1, output.shape[-1]), rows)]
        counts = mask.bool().numpy()
        # A head's logits of a text stand for each of its tokens.
        rows = output[counts] if output.ndim > 2 else output[counts.nonzero()[0]]
        return [CaseOutputs(rows, entropies.swapaxes(2, 3)[:, counts])]
