"""Verification of the form without a cache: whole batches against PyTorch, without the rows that are padding."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from sharp.exporter.uncached import UncachedModel
from sharp.exporter.uncached_session import UncachedSession
from sharp.exporter.verification import RUNTIMES, Comparison, Floats, Pair, compare
from sharp.models.normalizers import entropy
from sharp.plugins.manifest import Target

# (name, batch, length); a batch of an encoder has padding
CASES = (
    ("one", 1, 1),
    ("one of 45", 1, 45),
    ("batch of 3", 3, 19),
    ("batch of 7", 7, 2),
    ("long one", 1, 300),
)


@torch.no_grad()
def verify_uncached(
    model: UncachedModel, folder: Path, target: Target, on_case: Callable[[], None]
) -> Iterator[Comparison]:
    """Compare the model in `folder` with `model`, in the runtimes of its target."""
    generator = torch.Generator().manual_seed(0)
    # Learned positions end somewhere.
    drawn = {name: model.draw(batch, min(length, model.config.max_context), generator) for name, batch, length in CASES}
    expected = {name: _torch(model, inputs) for name, inputs in drawn.items()}
    for runtime, kernels in RUNTIMES[target]:
        session = UncachedSession(folder, kernels=kernels)
        for name, inputs in drawn.items():
            output, stats = session.run_with_stats([tensor.numpy() for tensor in inputs])
            yield compare(runtime, name, [_pair(model, inputs, output, stats[..., 0], *expected[name])])
            on_case()
        del session  # its weights, before the next one takes as much


def _torch(model: UncachedModel, inputs: tuple[torch.Tensor, ...]) -> tuple[Floats, Floats]:
    """Output and entropies [layers, batch, q_heads, queries] in PyTorch."""
    output, weights = model.eager(*inputs)
    return output.numpy(), torch.stack([entropy(layer) for layer in weights]).numpy()


def _pair(
    model: UncachedModel,
    inputs: tuple[torch.Tensor, ...],
    output: Floats,
    entropies: Floats,
    expected_output: Floats,
    expected_entropies: Floats,
) -> Pair:
    mask = model.attention_mask(*inputs)
    counts = np.ones(output.shape[:-1], bool) if mask is None else mask.bool().numpy()
    if counts.ndim == 1:  # one query a sequence: its axis is there in the entropies only
        counts = counts[:, None]
        output, expected_output = output[:, None], expected_output[:, None]
    return Pair(
        output[counts],
        expected_output[counts],
        entropies.swapaxes(2, 3)[:, counts],  # [layers, rows, q_heads]
        expected_entropies.swapaxes(2, 3)[:, counts],
    )
