"""Packs the chunks of a step into the inputs of the model."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharp.serving.backends import Batch
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.scheduler import Chunk


@dataclass(frozen=True)
class Outputs:
    """Which logits a step wants.

    Attributes:
        sampling: the chunks that get a new token from the logits of their last token; these rows come first.
        prompt: (chunk, tokens of it) whose logits tell how likely the next token of the prompt was; they follow.
        indices: the rows as places in the packed tokens, int64 [outputs].
    """

    sampling: tuple[int, ...]
    prompt: tuple[tuple[int, int], ...]
    indices: NDArray[np.int64]


def wanted_outputs(chunks: Rows[Chunk]) -> Outputs:
    """The logits that the sequences of `chunks` need."""
    ends = np.cumsum([chunk.tokens for chunk in chunks], dtype=np.int64)
    sampling = tuple(
        row
        for row, chunk in enumerate(chunks)
        if chunk.tokens == chunk.sequence.remaining and chunk.sequence.request.max_new_tokens
    )
    indices = [ends[list(sampling)] - 1]
    prompt = []
    for row, chunk in enumerate(chunks):
        sequence = chunk.sequence
        if sequence.missing_prompt_logprobs:
            # The token at position p tells about the one at p + 1; those before `known` have told.
            known = len(sequence.prompt_logprobs) - sequence.computed
            count = min(chunk.tokens - known, sequence.missing_prompt_logprobs)
            if count > 0:
                prompt.append((row, count))
                start = ends[row] - chunk.tokens + known
                indices.append(np.arange(start, start + count))
    return Outputs(sampling, tuple(prompt), np.concatenate(indices))


def pack(chunks: Rows[Chunk], blocks: BlockManager, outputs: Outputs, *, collect_stats: bool) -> Batch:
    """The batch of `chunks`."""
    starts = np.array([chunk.sequence.computed for chunk in chunks], np.int32)
    lengths = np.array([chunk.tokens for chunk in chunks], np.int64)
    query_start = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    tables = [blocks.table(chunk.sequence.number) for chunk in chunks]
    block_table = np.full((len(chunks), max(map(len, tables))), -1, np.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    rows = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]
    positions = np.arange(len(rows)) + (starts - query_start[:-1])[rows]
    block, offset = np.divmod(positions, blocks.block_size)
    token_ids = [
        token_id
        for chunk in chunks
        for token_id in chunk.sequence.token_ids[chunk.sequence.computed : chunk.sequence.computed + chunk.tokens]
    ]
    return Batch(
        input_ids=np.array(token_ids, np.int64),
        positions=positions,
        slot_mapping=(block_table[rows, block] * blocks.block_size + offset).astype(np.int32),
        block_table=block_table,
        query_start=query_start,
        context_lens=starts,
        # Runtimes differ in what they do with empty tensors, so there is always one output, wanted or not.
        logits_indices=outputs.indices if len(outputs.indices) else np.zeros(1, np.int64),
        collect_stats=collect_stats,
    )
