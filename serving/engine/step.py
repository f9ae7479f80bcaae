"""`Step`: the chunks of one step, which packs, computes and samples them before any sequence changes."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cpu.sampling import MOST_CHANGES, NO_TOKEN, Changes
from sharp.serving.api.errors import EngineError
from sharp.serving.api.events import TokenLogprobs
from sharp.serving.backends import DecoderBackend, SamplingBackend, StepInputs, StepOutput
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.logprobs import prompt_logprobs, sampled_logprobs
from sharp.serving.engine.sampler import SamplingRow, StepSampling, changes_of, sample
from sharp.serving.engine.scheduler import Chunk
from sharp.serving.engine.sequence import Sequence


@dataclass(frozen=True)
class Outputs:
    """The rows of logits that a step computes.

    Attributes:
        sampling: pairs (chunk, rows) of the chunks whose last token is followed by a sampled token. A chunk with a
            draft has one more row per draft token. These rows come first.
        prompt: pairs (chunk, rows) of the chunks for which the logprobs of following prompt tokens are requested. These
            rows come after those of `sampling`.
        indices: the rows as positions in the packed tokens, int64 [outputs].
    """

    sampling: tuple[tuple[int, int], ...]
    prompt: tuple[tuple[int, int], ...]
    indices: NDArray[np.int64]

    @property
    def sampled_rows(self) -> int:
        """The total number of rows in `sampling`."""
        return sum(rows for _, rows in self.sampling)


@dataclass(frozen=True)
class StepResult:
    """The results of a sampled step, which the engine commits to the sequences.

    `stats` are float32 [layers, tokens, q_heads, 4 or 5], None unless collected. The other fields map the index of a
    chunk in the step: `tokens` to its new token ids, `logprobs` to the logprobs of these tokens, `prompt_logprobs` to
    those of prompt tokens; chunks for which nothing was requested are missing.
    """

    stats: NDArray[np.float32] | None
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


class Step:
    """A step of the engine: the tokens of some sequences that the model computes in one call.

    Its life is: packed at creation, then `compute`, then `sample`; the engine commits its `result` afterwards. Failures
    are kept in `error`.

    Attributes:
        chunks: the chunks that the step computes.
        batch: the model's inputs for `chunks`.
        began: when the model began, in seconds of `time.perf_counter`.
        sampled_at: when the tokens of the step were known, in seconds of `time.perf_counter`.
        started: the step was handed to the backend.
        computed: the backend has finished or failed.
        sampled: the token of each row of `Outputs.sampling`, int64 [rows]; None before sampling or after a failure.
        error: the exception of a failed step.
    """

    def __init__(
        self, chunks: Rows[Chunk], blocks: BlockManager, *, collect_stats: bool, before: "Step | None" = None
    ) -> None:
        """Pack `chunks`, and collect attention statistics if `collect_stats` is set or a request needs them.

        Tokens that the step `before` has yet to sample are unknown here; `take_tokens` fills them in.
        """
        self.chunks = chunks
        self.began = self.sampled_at = 0.0
        self.started = self.computed = False
        self.error: BaseException | None = None
        self.sampled: NDArray[np.int64] | None = None
        self._result: StepResult | None = None
        self._output: StepOutput | None = None
        self._changes: Changes | None = None
        self._outputs = select_outputs(chunks)
        requested = any(chunk.sequence.request.attention for chunk in chunks)
        self.batch = pack(chunks, blocks, self._outputs, collect_stats=collect_stats or requested)
        self._sampling = StepSampling.of(
            [
                SamplingRow(chunks[chunk].sequence, chunks[chunk].draft[:ahead])
                for chunk, count in self._outputs.sampling
                for ahead in range(count)
            ]
        )
        self._row_of = {chunks[chunk].sequence.number: row for row, (chunk, _) in enumerate(self._outputs.sampling)}
        # Positions of unknown tokens in the packed tokens, and the rows of the previous step that sample them.
        self._unknown, self._known_from = unknown_tokens(chunks, before._row_of if before else {})

    @property
    def done(self) -> bool:
        """Whether the step is sampled or has failed."""
        return self.sampled is not None or self.error is not None

    @property
    def has_draft(self) -> bool:
        """Whether a chunk has draft tokens, so that the number of new tokens is unknown before sampling."""
        return any(chunk.draft for chunk in self.chunks)

    def reserve(self) -> None:
        """Count this step's tokens in its sequences, so that another step can be planned after this one.

        `release` must undo this, once for each call: when the step is committed, has failed or is dropped.
        """
        for chunk in self.chunks:
            chunk.sequence.launched += chunk.tokens
            chunk.sequence.expected += chunk.samples

    def release(self) -> None:
        """Subtract this step's tokens from its sequences again: it is being committed, failed or will not run."""
        for chunk in self.chunks:
            chunk.sequence.launched -= chunk.tokens
            chunk.sequence.expected -= chunk.samples

    def take_tokens(self, before: "Step") -> bool:
        """Fill in the tokens of the step `before`. Return False if no result of this step would be used."""
        if before.sampled is None:
            return False
        # A row without a token (NO_TOKEN is negative) fails at the commit of its step; the model needs a valid token id
        # anyway.
        self.batch.input_ids[self._unknown] = np.maximum(before.sampled[self._known_from], 0)
        return any(not (chunk.sequence.ended or before.ends(chunk.sequence)) for chunk in self.chunks)

    def prepare_sampling(self) -> None:
        """Compute the changes to the logits that a sampling backend applies before it samples.

        Call this when the step's input tokens are known. All earlier steps are then committed, except the step that
        sampled the tokens that were unknown at packing.
        """
        if self._sampling.changed and self.needs_tokens_only:
            self._changes = changes_of([*self._known_rows()])

    def _known_rows(self) -> Iterator[SamplingRow]:
        """Yield the rows to sample, with the token that was unknown at packing put in front of the row's draft."""
        rows = iter(self._sampling.rows)
        start = 0
        for chunk, end in zip(self.chunks, self.batch.query_start[1:].tolist(), strict=True):
            if chunk.samples:
                last = start + chunk.tokens - 1
                known = (int(self.batch.input_ids[last]),) if chunk.unknown else ()
                for row in islice(rows, 1 + len(chunk.draft)):
                    yield replace(row, draft=(*known, *row.draft))
            start = end

    def ends(self, sequence: Sequence) -> bool:
        """Whether the token that this step sampled ends a sequence, regardless of its text; False before sampling."""
        row = self._row_of.get(sequence.number)
        return row is not None and self.sampled is not None and int(self.sampled[row]) in sequence.stop.token_ids

    @property
    def needs_tokens_only(self) -> bool:
        """Whether a sampling backend can return tokens without logits."""
        return self._sampling.sparse and not self._outputs.prompt and bool(self._sampling.rows)

    def compute(self, backend: DecoderBackend, sampling: SamplingBackend | None = None) -> None:
        """Run the model, and sample in the backend if it can and no logits are needed. Keep failures in `error`."""
        self.began = time.perf_counter()
        try:
            if sampling is not None and self.needs_tokens_only and _few(self._changes):
                self._output = sampling.step_and_sample(self.batch, self._sampling.parameters, self._changes)
            else:
                self._output = backend.step(self.batch)
        except BaseException as error:  # a panic of Rust is not an Exception
            self.error = error
        self.computed = True

    def sample(self, threads: int = 1) -> None:
        """Sample with at most `threads` threads, after the previous step is committed. Keep failures in `error`."""
        if self.error is None:
            try:
                self.sampled = self._sample(threads)
            except BaseException as error:
                self.error = error
        self.sampled_at = time.perf_counter()

    def _sample(self, threads: int) -> NDArray[np.int64]:
        """Return the sampled token of each row [rows]; `threads` is for sampling on the CPU."""
        output = self._output
        assert output is not None
        _check(output, self.batch)
        if output.sampled is not None:
            return output.sampled
        sampled = sample(output.logits[: len(self._sampling.rows)], self._sampling, threads, self._changes)
        # Logprobs are computed now, because the next step may overwrite the logits.
        if self._sampling.logprobs or self._outputs.prompt:
            self._result = self._make_result(output, sampled)
        return sampled

    def result(self) -> StepResult:
        """Return the results of the sampled step, or raise the exception with which it failed."""
        if self.error is not None:
            raise self.error
        if self._result is None:
            assert self._output is not None
            assert self.sampled is not None
            self._result = self._make_result(self._output, self.sampled)
        return self._result

    def _make_result(self, output: StepOutput, sampled: NDArray[np.int64]) -> StepResult:
        """Return the result of the step: accepted tokens per chunk, log-probabilities and statistics.

        `sampled` are the sampled tokens [rows].
        """
        chunks, outputs, following = self.chunks, self._outputs, iter(sampled.tolist())
        tokens = {
            chunk: accepted_tokens(chunks[chunk], [*islice(following, count)]) for chunk, count in outputs.sampling
        }
        requested = self._sampling.logprobs
        return StepResult(
            output.stats,
            tokens,
            sampled_logprobs(chunks, outputs.sampling, output.logits, tokens) if requested else {},
            prompt_logprobs(chunks, outputs.prompt, output.logits[len(sampled) :]),
        )


def _few(changes: Changes | None) -> bool:
    """Whether `changes` are few enough for a sampling backend."""
    return changes is None or len(changes.entries) <= MOST_CHANGES


def _check(output: StepOutput, batch: StepInputs) -> None:
    """Raise EngineError if an output has the wrong number of rows or tokens, before any sequence changes."""
    tokens, rows = len(batch.positions), len(batch.logits_indices)
    found = len(output.logits if output.sampled is None else output.sampled)
    if found != rows or (output.stats is not None and output.stats.shape[1] != tokens):
        raise EngineError(
            f"the model returned {found} rows of logits for {rows} outputs"
            + ("" if output.stats is None else f", statistics of {output.stats.shape[1]} tokens for {tokens}")
        )


def select_outputs(chunks: Rows[Chunk]) -> Outputs:
    """Return which rows of logits the sequences of `chunks` need, for sampling and for prompt log-probabilities."""
    sampling: list[tuple[int, int]] = []
    prompt: list[tuple[int, int]] = []
    last: list[int] = []  # `last` and `following` hold positions in the packed tokens
    following: list[int] = []
    start = 0
    for row, chunk in enumerate(chunks):
        sequence = chunk.sequence
        if chunk.samples:
            sampling.append((row, 1 + len(chunk.draft)))
            last += range(start + chunk.tokens - 1, start + chunk.width)
        if sequence.missing_prompt_logprobs:
            # The logits at position p give the logprob of the token at p + 1. Positions before `known` are done.
            known = sequence.scheduled_prompt_logprobs - chunk.start
            count = min(chunk.tokens - known, sequence.missing_prompt_logprobs)
            if count > 0:
                prompt.append((row, count))
                following += range(start + known, start + known + count)
        start += chunk.width
    return Outputs(tuple(sampling), tuple(prompt), np.array(last + following, np.int64))


def pack(chunks: Rows[Chunk], blocks: BlockManager, outputs: Outputs, *, collect_stats: bool) -> StepInputs:
    """Return the batch of `chunks`, with 0 for each token that is not known yet.

    The loop fills Python lists. If every chunk has one token, a single numpy call would cost more than the whole loop.
    """
    size = blocks.block_size
    tables = [blocks.table(chunk.sequence.number) for chunk in chunks]
    block_table = np.full((len(chunks), max(map(len, tables))), -1, np.int32)
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    for chunk, table, row in zip(chunks, tables, block_table, strict=True):
        start, end = chunk.start, chunk.start + chunk.width
        row[: len(table)] = table
        held = table[start // size : -(-end // size)].tolist()
        input_ids += chunk.sequence.token_ids[start : start + chunk.tokens]
        if chunk.unknown:
            input_ids.append(0)
        input_ids += chunk.draft
        positions += range(start, end)
        slots += [held[position // size - start // size] * size + position % size for position in range(start, end)]
        query_start.append(len(input_ids))
    return StepInputs(
        input_ids=np.array(input_ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int32),
        block_table=block_table,
        query_start=np.array(query_start, np.int32),
        context_lens=np.array([chunk.start for chunk in chunks], np.int32),
        # Runtimes differ in what they do with empty tensors, so there is always at least one output, used or not.
        logits_indices=outputs.indices if len(outputs.indices) else np.zeros(1, np.int64),
        collect_stats=collect_stats,
    )


def unknown_tokens(chunks: Rows[Chunk], rows: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of unknown packed tokens, and the row of the previous step that samples each of them.

    `rows` maps sequence numbers to rows of the previous step.
    """
    positions: list[int] = []
    start = 0
    for chunk in chunks:
        if chunk.unknown:
            positions.append(start + chunk.tokens - 1)
        start += chunk.width
    from_rows = [rows[chunk.sequence.number] for chunk in chunks if chunk.unknown]
    return np.array(positions, np.int64), np.array(from_rows, np.int64)


def accepted_tokens(chunk: Chunk, sampled: list[int]) -> list[int]:
    """Return the tokens sampled after a chunk and its draft.

    They end with the first token that differs from the draft or ends the text.
    """
    for position, (token, draft) in enumerate(zip(sampled, chunk.draft, strict=False)):
        if token != draft or token in chunk.sequence.stop.token_ids:
            return sampled[: position + 1]
        if sampled[position + 1] == NO_TOKEN:  # the next step, without a draft, finds the reason
            return sampled[: position + 1]
    return sampled
