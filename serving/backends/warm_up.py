"""Steps that a GPU computes before the first request, to load kernels and to find out how much memory steps take.

The tokens of these steps see no keys and are not stored. Scratch memory and grids depend only on shapes, so these steps
take the same memory as real steps of the same shapes.
"""

from collections.abc import Iterator

import numpy as np

from sharp.serving.backends.backend import StepInputs, StepLimits

TOKENS = 6  # five tokens of one sequence, more than the decode kernel takes, and one token of another
BLOCKS = 1024  # width of a block table for which a GPU splits the keys of these tokens


def first_step() -> StepInputs:
    """Return a step with a prompt and a decode token, which launches both kinds of kernels."""
    return _batch(np.array([0, TOKENS - 1, TOKENS]), BLOCKS, outputs=1, collect_stats=False)


def largest_steps(largest: StepLimits, block_size: int) -> Iterator[StepInputs]:
    """Yield the two steps that take the most memory: one of prompts and one of decoding, with logits of every token.

    `block_size` is the number of tokens of a cache block.
    """
    pages = -(-largest.context // block_size)
    sequences = min(largest.sequences, largest.tokens)
    starts = np.arange(sequences + 1)
    prompt = np.append(starts[:-1], largest.tokens)  # one token per sequence, and all remaining tokens in the last
    yield _batch(prompt, pages, outputs=largest.tokens, collect_stats=True)
    yield _batch(starts, pages, outputs=sequences, collect_stats=True)


def decode_step(sequences: int, pages: int) -> StepInputs:
    """Return a step with one token for each of `sequences` sequences, over a table of `pages` blocks per sequence."""
    return _batch(np.arange(sequences + 1), pages, outputs=sequences, collect_stats=False)


def _batch(query_start: np.ndarray, pages: int, *, outputs: int, collect_stats: bool) -> StepInputs:
    """Return the inputs of a step that writes to no slot and reads no block.

    `query_start` [sequences + 1] are the cumulated token counts, `pages` the width of the block table, and `outputs`
    the number of rows of logits. `collect_stats` is the input of that name.
    """
    tokens, sequences = int(query_start[-1]), len(query_start) - 1
    return StepInputs(
        input_ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        slot_mapping=np.full(tokens, -1, np.int32),
        block_table=np.full((sequences, pages), -1, np.int32),
        query_start=query_start.astype(np.int32),
        context_lens=np.zeros(sequences, np.int32),
        logits_indices=np.arange(outputs),
        collect_stats=collect_stats,
    )
