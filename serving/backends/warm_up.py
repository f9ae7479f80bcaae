"""Steps that are computed before the first request, on a GPU: they load kernels, and show what memory steps take.

Their tokens see no keys and are stored nowhere. Scratch memory and grids follow from shapes alone, so they take what
real steps of these shapes take.
"""

from collections.abc import Iterator

import numpy as np

from sharp.serving.backends.backend import Batch, Limits

TOKENS = 6  # five of a sequence, more than decoding takes, and one of another
BLOCKS = 1024  # of a table that is so wide that a GPU splits the keys of these tokens


def first_step() -> Batch:
    """A prompt and a token of another sequence: beside each other, both kinds of kernels are launched."""
    return _batch(np.array([0, TOKENS - 1, TOKENS]), BLOCKS, outputs=1, collect_stats=False)


def largest_steps(largest: Limits, block_size: int) -> Iterator[Batch]:
    """The steps that take the most memory: prompts beside each other, and decoding, both with logits of every token."""
    pages = -(-largest.context // block_size)
    sequences = min(largest.sequences, largest.tokens)
    starts = np.arange(sequences + 1)
    prompt = np.append(starts[:-1], largest.tokens)  # one token each, and the last sequence has the others
    yield _batch(prompt, pages, outputs=largest.tokens, collect_stats=True)
    yield _batch(starts, pages, outputs=sequences, collect_stats=True)


def decode_step(sequences: int, pages: int) -> Batch:
    """One token for each of so many sequences, over a table of so many blocks."""
    return _batch(np.arange(sequences + 1), pages, outputs=sequences, collect_stats=False)


def _batch(query_start: np.ndarray, pages: int, *, outputs: int, collect_stats: bool) -> Batch:
    tokens, sequences = int(query_start[-1]), len(query_start) - 1
    return Batch(
        input_ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        slot_mapping=np.full(tokens, -1, np.int32),
        block_table=np.full((sequences, pages), -1, np.int32),
        query_start=query_start.astype(np.int32),
        context_lens=np.zeros(sequences, np.int32),
        logits_indices=np.arange(outputs),
        collect_stats=collect_stats,
    )
