"""Does the model folder compute what PyTorch computes?

Every case runs contexts into the cache first and new tokens after it, all sequences of the case in one step, and
compares each row with one uncached PyTorch pass over the whole sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sharp.exporter.decoder import Decoder
from sharp.exporter.paged_session import Floats, PagedSession
from sharp.models.attention import EagerAttention
from sharp.models.normalizers import entropy

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
# Relative to the largest logit: float32 sums in another order differ by some 1e-6 a layer.
LOGITS_TOLERANCE = 1e-4
ENTROPY_TOLERANCE = 1e-3  # nats


@dataclass(frozen=True)
class Comparison:
    """One case on one runtime, against PyTorch.

    `logits_error` is max |difference| / max |PyTorch logit|; `entropy_error` is in nats, over all layers and heads.
    """

    runtime: str
    case: str
    rows: int
    logits_error: float
    entropy_error: float
    same_greedy: int

    @property
    def passed(self) -> bool:
        """Both errors are within their tolerance (a nan is not)."""
        return self.logits_error <= LOGITS_TOLERANCE and self.entropy_error <= ENTROPY_TOLERANCE


def verify(decoder: Decoder, folder: Path, on_case: Callable[[], None]) -> Iterator[Comparison]:
    """Compare the model in `folder` with `decoder`, with the kernel library and with the function body inlined."""
    generator = np.random.default_rng(0)
    sequences = {
        name: [generator.integers(0, decoder.config.vocab_size, sum(lengths)) for lengths in case]
        for name, case in CASES
    }
    expected = {name: [_torch(decoder, tokens) for tokens in sequences[name]] for name, _ in CASES}
    for runtime, kernels in (("kernels", True), ("inlined", False)):
        session = PagedSession(folder, decoder.config, kernels=kernels)
        for name, case in CASES:
            yield _compare(session, runtime, name, case, sequences[name], expected[name])
            on_case()


def _compare(
    session: PagedSession,
    runtime: str,
    name: str,
    case: tuple[tuple[int, int], ...],
    sequences: list[Tokens],
    expected: list[tuple[Floats, Floats]],
) -> Comparison:
    session.reset(len(case), max(len(tokens) for tokens in sequences))
    contexts = [tokens[:context] for tokens, (context, _) in zip(sequences, case, strict=True)]
    rows: list[tuple[Floats, Floats, Floats, Floats]] = []
    if any(len(context) for context in contexts):
        kept = [
            (reference, len(context)) for reference, context in zip(expected, contexts, strict=True) if len(context)
        ]
        for logits, stats, ((want, want_entropy), end) in zip(*session.step(contexts), kept, strict=True):
            rows.append((logits, want[:end], stats[..., 0], want_entropy[:, :end]))
    new = [tokens[context:] for tokens, (context, _) in zip(sequences, case, strict=True)]
    for logits, stats, (want, want_entropy), (start, _) in zip(*session.step(new), expected, case, strict=True):
        rows.append((logits, want[start:], stats[..., 0], want_entropy[:, start:]))
    # numpy's maximum and not Python's, which drops a nan that is not the first.
    largest = float(np.max([np.abs(want).max() for _, want, _, _ in rows]))
    return Comparison(
        runtime=runtime,
        case=name,
        rows=sum(len(got) for got, *_ in rows),
        logits_error=float(np.max([np.abs(got - want).max() for got, want, *_ in rows])) / largest,
        entropy_error=float(np.max([np.abs(got - want).max() for *_, got, want in rows])),
        same_greedy=sum(int((got.argmax(-1) == want.argmax(-1)).sum()) for got, want, *_ in rows),
    )


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
