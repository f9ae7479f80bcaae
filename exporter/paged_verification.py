"""Verification of the paged form.

Every case runs contexts into the cache first and new tokens after it, all sequences of the case in one step, and
compares each row with one uncached PyTorch pass over the whole sequence.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sharp.exporter.decoder import Decoder
from sharp.exporter.paged_session import PagedSession
from sharp.exporter.verification import RUNTIMES, Comparison, Floats, Pair, compare
from sharp.models.attention import EagerAttention
from sharp.models.normalizers import entropy
from sharp.plugins.manifest import Target

Tokens = NDArray[np.int64]

# (name, (context, new tokens) of every sequence)
CASES: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("first token", ((0, 1),)),
    ("prompt", ((0, 45),)),
    ("decode", ((33, 1),)),
    ("prompt in two chunks", ((21, 19),)),
    ("decode, batch of 3", ((15, 1), (16, 1), (38, 1))),
    ("prompt joins decode", ((0, 18), (40, 1), (7, 13))),
)


def verify_paged(decoder: Decoder, folder: Path, target: Target, on_case: Callable[[], None]) -> Iterator[Comparison]:
    """Compare the model in `folder` with `decoder`, in the runtimes of its target."""
    generator = np.random.default_rng(0)
    sequences = {
        name: [generator.integers(0, decoder.config.vocab_size, sum(lengths)) for lengths in case]
        for name, case in CASES
    }
    expected = {name: [_torch(decoder, tokens) for tokens in sequences[name]] for name, _ in CASES}
    for runtime, kernels in RUNTIMES[target]:
        session = PagedSession(folder, decoder.config, kernels=kernels)
        for name, case in CASES:
            yield compare(runtime, name, _run(session, case, sequences[name], expected[name]))
            on_case()
        del session  # its weights, before the next one takes as much


def _run(
    session: PagedSession,
    case: tuple[tuple[int, int], ...],
    sequences: list[Tokens],
    expected: list[tuple[Floats, Floats]],
) -> list[Pair]:
    session.reset(len(case), max(len(tokens) for tokens in sequences))
    contexts = [tokens[:context] for tokens, (context, _) in zip(sequences, case, strict=True)]
    pairs: list[Pair] = []
    if any(len(context) for context in contexts):
        kept = [
            (reference, len(context)) for reference, context in zip(expected, contexts, strict=True) if len(context)
        ]
        for logits, stats, ((want, want_entropy), end) in zip(*session.step(contexts), kept, strict=True):
            pairs.append(Pair(logits, want[:end], stats[..., 0], want_entropy[:, :end]))
    new = [tokens[context:] for tokens, (context, _) in zip(sequences, case, strict=True)]
    for logits, stats, (want, want_entropy), (start, _) in zip(*session.step(new), expected, case, strict=True):
        pairs.append(Pair(logits, want[start:], stats[..., 0], want_entropy[:, start:]))
    return pairs


@torch.no_grad()
def _torch(decoder: Decoder, tokens: Tokens) -> tuple[Floats, Floats]:
    """Logits [tokens, vocab] and entropies [layers, tokens, q_heads] of one sequence in PyTorch."""
    input_ids = torch.from_numpy(tokens)[None]
    attention = EagerAttention(decoder.config, record=True)
    hidden = decoder.hidden_states(input_ids, torch.arange(len(tokens))[None], attention)
    # The source's own code where it has the norm, or else the one definition in sharp.models.
    logits = decoder.own_logits(input_ids)
    if logits is None:
        logits = decoder.logits(hidden)
    entropies = torch.stack([entropy(weights)[0].T for weights in attention.weights])
    return logits[0].numpy(), entropies.numpy()
