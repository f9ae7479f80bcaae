"""Packs the chunks of a step into the inputs of the model."""

from collections.abc import Sequence as Rows

import numpy as np

from sharp.serving.backends import Batch
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.scheduler import Chunk


def pack(chunks: Rows[Chunk], blocks: BlockManager, outputs: Rows[int], *, collect_stats: bool) -> Batch:
    """The batch of `chunks`; `outputs` are the chunks whose last token's logits are wanted."""
    starts = [chunk.sequence.computed for chunk in chunks]
    lengths = [chunk.tokens for chunk in chunks]
    positions = [
        np.arange(start, start + length, dtype=np.int64) for start, length in zip(starts, lengths, strict=True)
    ]
    tables = [blocks.table(chunk.sequence.request_id) for chunk in chunks]
    block_table = np.full((len(chunks), max(map(len, tables))), -1, np.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    query_start = np.cumsum([0, *lengths], dtype=np.int32)
    token_ids = [
        token_id
        for chunk, start in zip(chunks, starts, strict=True)
        for token_id in chunk.sequence.token_ids[start : start + chunk.tokens]
    ]
    last = query_start[1:].astype(np.int64) - 1
    return Batch(
        input_ids=np.array(token_ids, np.int64),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(
            [blocks.slots(chunk.sequence.request_id, p) for chunk, p in zip(chunks, positions, strict=True)]
        ),
        block_table=block_table,
        query_start=query_start,
        context_lens=np.array(starts, np.int32),
        # Runtimes differ in what they do with empty tensors, so there is always one output, wanted or not.
        logits_indices=last[list(outputs)] if outputs else last[:1],
        collect_stats=collect_stats,
    )
