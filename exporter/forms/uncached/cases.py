"""Verification of the form without a cache, which compares whole batches with PyTorch, except for rows of padding."""

from pathlib import Path

import numpy as np
import torch

from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.exporter.sources.uncached_model import ANY_NUMBER_OF_ITEMS, UncachedDecoder, UncachedModel
from sharp.exporter.verification.comparison import CaseOutputs, CaseShape, Floats, Tokens
from sharp.exporter.verification.greedy_decoding import Append
from sharp.exporter.verification.torch_outputs import torch_logits
from sharp.plugins.op.torch_normalizers import entropy

# All rows of a batch have the same length. Batches of an encoder have padding.
CASES = {
    "one": (CaseShape(1),),
    "one of 45": (CaseShape(45),),
    "batch of 3": (CaseShape(19),) * 3,
    "batch of 7": (CaseShape(2),) * 7,
    "long one": (CaseShape(300),),
}


class UncachedVerifier:
    """The `Verifier` of a model without a cache. The rows of all sequences of a case are compared as one output."""

    text_step = ANY_NUMBER_OF_ITEMS  # a whole window, because without a cache every step reads all earlier tokens again

    def __init__(self, model: UncachedModel) -> None:
        self.model = model
        self.config = model.config
        self.writes_text = isinstance(model, UncachedDecoder)
        generator = torch.Generator().manual_seed(0)
        longest = model.config.max_context
        self.cases = {name: tuple(shape.within(longest) for shape in shapes) for name, shapes in CASES.items()}
        self.inputs = {
            name: model.random_inputs(len(shapes), shapes[0].tokens, generator) for name, shapes in self.cases.items()
        }

    @torch.no_grad()
    def expected(self, case: str) -> list[CaseOutputs]:
        """Compute the batch of the case in PyTorch, in the present precision of the model."""
        inputs = self.inputs[case]
        double = next(self.model.parameters()).dtype == torch.float64
        output, weights = self.model.eager(
            *(tensor.double() if double and tensor.is_floating_point() else tensor for tensor in inputs)
        )
        return self._case_outputs(
            inputs, output.numpy(), self.model.stack([entropy(layer) for layer in weights]).numpy()
        )

    def open(self, folder: Path, *, kernels: bool) -> UncachedSession:
        """Open the written model in ONNX Runtime; `kernels` says whether Sharp's library computes attention."""
        return UncachedSession(folder, kernels=kernels)

    def run(self, session: UncachedSession, case: str) -> list[CaseOutputs]:
        """Compute the batch of the case with the written model."""
        inputs = self.inputs[case]
        output, stats = session.run_with_stats([tensor.numpy() for tensor in inputs])
        return self._case_outputs(inputs, output, stats[..., 0])

    def begin(self, session: UncachedSession, tokens: int) -> Append:
        """Start one sequence; return a function that appends tokens and computes the whole sequence anew.

        The function takes int64 [new tokens] and returns the logits of these, [new tokens, vocab].
        """
        del tokens
        sequence = np.zeros(0, np.int64)

        def append(new: Tokens) -> Floats:
            """Append tokens to the sequence and return their logits [tokens, vocab], computing all tokens again."""
            nonlocal sequence
            sequence = np.concatenate([sequence, new])
            logits: Floats = session.run([sequence[None]])[0, -len(new) :]
            return logits

        return append

    def logits(self, tokens: Tokens) -> Floats:
        """Compute logits [tokens, vocab] of a sequence in PyTorch. The model must be a decoder."""
        assert isinstance(self.model, UncachedDecoder)
        return torch_logits(self.model.decoder, tokens)

    def _case_outputs(self, inputs: tuple[torch.Tensor, ...], output: Floats, entropies: Floats) -> list[CaseOutputs]:
        """Return the results of the case's batch without the rows of padding, in a list of one.

        `output` is [batch, queries, size], or [batch, size] of a classification head; `entropies` are [layers, batch,
        q_heads, queries].
        """
        mask = self.model.attention_mask(*inputs)
        if mask is None:  # all rows count; the output may have another number of rows than there are queries
            rows = entropies.swapaxes(2, 3).reshape(len(entropies), -1, entropies.shape[2])
            return [CaseOutputs(output.reshape(-1, output.shape[-1]), rows)]
        counts = mask.bool().numpy()
        # A classification head has one row for a text, which is repeated for each of its tokens.
        rows = output[counts] if output.ndim > 2 else output[counts.nonzero()[0]]
        return [CaseOutputs(rows, entropies.swapaxes(2, 3)[:, counts])]
