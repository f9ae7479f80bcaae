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
    """Which logits a step computes.

    Attributes:
        sampling: (chunk, rows): those that get a new token from the logits of their last one, and more where these
            and the tokens of their draft agree; these rows come first.
        prompt: (chunk, tokens of it) whose logits tell how likely the next token of the prompt was; they follow.
        indices: the rows as positions in the packed tokens, int64 [outputs].
    """

    sampling: tuple[tuple[int, int], ...]
    prompt: tuple[tuple[int, int], ...]
    indices: NDArray[np.int64]

    @property
    def sampled_rows(self) -> int:
        """How many rows `sampling` has."""
        return sum(rows for _, rows in self.sampling)


def select_outputs(chunks: Rows[Chunk]) -> Outputs:
    """The logits that the sequences of `chunks` need."""
    sampling: list[tuple[int, int]] = []
    prompt: list[tuple[int, int]] = []
    last: list[int] = []  # these two are positions in the packed tokens
    following: list[int] = []
    start = 0
    for row, chunk in enumerate(chunks):
        sequence = chunk.sequence
        if chunk.tokens == sequence.remaining and sequence.request.max_new_tokens:
            sampling.append((row, 1 + len(chunk.draft)))
            last += range(start + chunk.tokens - 1, start + chunk.width)
        if sequence.missing_prompt_logprobs:
            # The token at position p tells about the one at p + 1; those before `known` have told.
            known = len(sequence.prompt.logprobs) - sequence.computed
            count = min(chunk.tokens - known, sequence.missing_prompt_logprobs)
            if count > 0:
                prompt.append((row, count))
                following += range(start + known, start + known + count)
        start += chunk.width
    return Outputs(tuple(sampling), tuple(prompt), np.array(last + following, np.int64))


def pack(chunks: Rows[Chunk], blocks: BlockManager, outputs: Outputs, *, collect_stats: bool) -> Batch:
    """The batch of `chunks`.

    In lists: where every chunk has one token, each function of numpy would cost more than all of them.
    """
    size = blocks.block_size
    tables = [blocks.table(chunk.sequence.number) for chunk in chunks]
    block_table = np.full((len(chunks), max(map(len, tables))), -1, np.int32)
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    for chunk, table, row in zip(chunks, tables, block_table, strict=True):
        start, end = chunk.sequence.computed, chunk.sequence.computed + chunk.width
        row[: len(table)] = table
        held = table[start // size : -(-end // size)].tolist()
        input_ids += chunk.sequence.token_ids[start : start + chunk.tokens]
        input_ids += chunk.draft
        positions += range(start, end)
        slots += [held[position // size - start // size] * size + position % size for position in range(start, end)]
        query_start.append(len(input_ids))
    return Batch(
        input_ids=np.array(input_ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int32),
        block_table=block_table,
        query_start=np.array(query_start, np.int32),
        context_lens=np.array([chunk.sequence.computed for chunk in chunks], np.int32),
        # Runtimes differ in what they do with empty tensors, so there is always one output, used or not.
        logits_indices=outputs.indices if len(outputs.indices) else np.zeros(1, np.int64),
        collect_stats=collect_stats,
    )
