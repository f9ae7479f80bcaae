"""`run_step`: packs the chunks of one step, runs the model and samples, before any sequence changes."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.sampling import NO_TOKEN
from sharp.serving.api.errors import EngineError
from sharp.serving.api.events import TokenLogprobs
from sharp.serving.backends import Backend, Batch, StepOutput
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.logprobs import prompt_logprobs, sampled_logprobs
from sharp.serving.engine.sampler import SamplingRow, sample
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


@dataclass(frozen=True)
class StepResult:
    """The output of the model, and the tokens sampled from it."""

    output: StepOutput
    positions: NDArray[np.int64]  # [tokens]
    tokens: dict[int, list[int]]  # chunk -> new tokens
    logprobs: dict[int, list[TokenLogprobs]]  # chunk -> those of the new tokens
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # chunk -> those of its tokens


def run_step(chunks: Rows[Chunk], blocks: BlockManager, backend: Backend, *, collect_stats: bool) -> StepResult:
    """Run the model on `chunks` and sample tokens; attention statistics are also collected if a request needs them."""
    outputs = select_outputs(chunks)
    requested = any(chunk.sequence.request.attention for chunk in chunks)
    batch = pack(chunks, blocks, outputs, collect_stats=collect_stats or requested)
    output = backend.step(batch)
    _check(output, batch)
    rows = [
        SamplingRow(chunks[chunk].sequence, chunks[chunk].draft[:ahead])
        for chunk, count in outputs.sampling
        for ahead in range(count)
    ]
    sampled = iter(sample(output.logits[: len(rows)], rows).tolist())
    tokens = {chunk: accepted_tokens(chunks[chunk], [*islice(sampled, count)]) for chunk, count in outputs.sampling}
    return StepResult(
        output,
        batch.positions,
        tokens,
        sampled_logprobs(chunks, outputs.sampling, output.logits, tokens),
        prompt_logprobs(chunks, outputs.prompt, output.logits[outputs.sampled_rows :]),
    )


def _check(output: StepOutput, batch: Batch) -> None:
    """Refuse an output of another size, before a sequence changes by it."""
    tokens, rows = len(batch.positions), len(batch.logits_indices)
    if len(output.logits) != rows or (output.stats is not None and output.stats.shape[1] != tokens):
        raise EngineError(
            f"the model returned {len(output.logits)} rows of logits for {rows} outputs"
            + ("" if output.stats is None else f", statistics of {output.stats.shape[1]} tokens for {tokens}")
        )


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


def accepted_tokens(chunk: Chunk, sampled: list[int]) -> list[int]:
    """The tokens sampled after a chunk and its draft, up to the first that differs from the draft or ends the text."""
    for position, (token, draft) in enumerate(zip(sampled, chunk.draft, strict=False)):
        if token != draft or token in chunk.sequence.stop.token_ids:
            return sampled[: position + 1]
        if sampled[position + 1] == NO_TOKEN:  # the next step, without a draft, finds out why
            return sampled[: position + 1]
    return sampled
