"""Verification of the contiguous form: prompts and the steps after them against uncached PyTorch passes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from sharp.exporter.contiguous_session import ContiguousSession
from sharp.exporter.decoder import Decoder
from sharp.exporter.uncached import UncachedDecoder
from sharp.exporter.verification import RUNTIMES, Comparison, Pair, compare
from sharp.models.normalizers import entropy
from sharp.plugins.manifest import Target

# (name, sequences, new tokens of every step)
CASES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("first token", 1, (1,)),
    ("prompt", 1, (45,)),
    ("prompt and decode", 1, (33, 1, 1)),
    ("prompt in two chunks", 1, (21, 19)),
    ("batch of 3", 3, (18, 1, 7)),
)


@torch.no_grad()
def verify_contiguous(
    decoder: Decoder, folder: Path, target: Target, on_case: Callable[[], None]
) -> Iterator[Comparison]:
    """Compare the model in `folder` with `decoder`, in the runtimes of its target."""
    model = UncachedDecoder(decoder)
    generator = torch.Generator().manual_seed(0)
    drawn = {name: model.draw(sequences, sum(steps), generator) for name, sequences, steps in CASES}
    expected = {name: model.eager(*inputs) for name, inputs in drawn.items()}
    for runtime, kernels in RUNTIMES[target]:
        session = ContiguousSession(folder, kernels=kernels)
        for name, sequences, steps in CASES:
            (tokens,) = drawn[name]
            output, weights = expected[name]
            wanted = torch.stack([entropy(layer) for layer in weights]).numpy()  # [layers, sequences, q_heads, tokens]
            session.reset(sequences)
            pairs, start = [], 0
            for count in steps:
                end = start + count
                logits, stats = session.step(tokens[:, start:end].numpy())
                vocab = logits.shape[-1]
                want = output[:, start:end].numpy()
                pairs.append(
                    Pair(logits.reshape(-1, vocab), want.reshape(-1, vocab), stats[..., 0], wanted[..., start:end])
                )
                start = end
            yield compare(runtime, name, pairs)
            on_case()
        del session  # its weights, before the next one takes as much
