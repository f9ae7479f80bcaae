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
    starts = [chunk.sequence.computed for chunk in chunks]
    lengths = [chunk.tokens for chunk in chunks]
    positions = [
        np.arange(start, start + length, dtype=np.int64) for start, length in zip(starts, lengths, strict=True)
    ]
    tables = [blocks.table(chunk.sequence.number) for chunk in chunks]
    block_table = np.full((len(chunks), max(map(len, tables))), -1, np.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    token_ids = [
        token_id
        for chunk, start in zip(chunks, starts, strict=True)
        for token_id in chunk.sequence.token_ids[start : start + chunk.tokens]
    ]
    return Batch(
        input_ids=np.array(token_ids, np.int64),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(
            [blocks.slots(chunk.sequence.number, p) for chunk, p in zip(chunks, positions, strict=True)]
        ),
        block_table=block_table,
        query_start=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array(starts, np.int32),
        # Runtimes differ in what they do with empty tensors, so there is always one output, wanted or not.
        logits_indices=outputs.indices if len(outputs.indices) else np.zeros(1, np.int64),
        collect_stats=collect_stats,
    )
