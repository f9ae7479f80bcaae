"""`RunningRequests`: the unfinished requests, and the commit of a step's results to them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.cpu.sampling import NO_TOKEN
from sharp.serving.api.attention import AttentionRows, TokenEntropies
from sharp.serving.api.errors import EngineError, InputError, SharpError
from sharp.serving.api.events import (
    Delta,
    Event,
    Failed,
    FinishReason,
    PromptChunk,
    PromptComputed,
    TokenLogprobs,
)
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.report import Ended, Tally, Timed
from sharp.serving.engine.sampler import SamplingRow, masks_all
from sharp.serving.engine.scheduler import Chunk, Scheduler
from sharp.serving.engine.sequence import Ending, Sequence
from sharp.serving.engine.step import Step, StepResult

logger = logging.getLogger(__name__)

ALL_MASKED = "no token may follow: guided, allowed_token_ids, bad_words and min_tokens leave none"


@dataclass
class _SequenceGroup:
    """The unfinished sequences of a request by index, and those held until the first has computed the prompt."""

    unfinished: dict[int, Sequence]
    held: list[Sequence]


class RunningRequests:
    """The unfinished requests, to whose sequences steps are committed. Each change is an event of its request.

    Attributes:
        failed_steps: the number of consecutive steps that failed or in which no request had finite logits.
        tally: what happened since the last report.
    """

    def __init__(self, scheduler: Scheduler, blocks: BlockManager, vocab_size: int) -> None:
        self.failed_steps = 0
        self.tally = Tally()
        self._scheduler = scheduler
        self._blocks = blocks
        self._vocab_size = vocab_size
        self._groups: dict[str, _SequenceGroup] = {}
        self._finite: set[bool] = set()  # whether logits were finite, as found in the current step

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences."""
        return (sequence for group in self._groups.values() for sequence in group.unfinished.values())

    @property
    def held(self) -> int:
        """The number of sequences that wait for the first sequence of their request to compute the prompt."""
        return sum(len(group.held) for group in self._groups.values())

    def add(self, request_id: str, sequences: list[Sequence]) -> None:
        """Add a request of one or more sequences: queue the first, and hold the others until the prompt is computed."""
        self._groups[request_id] = _SequenceGroup(dict(enumerate(sequences)), sequences[1:])
        self._scheduler.add(sequences[0])

    def cancel(self, request_id: str) -> list[Event]:
        """End a request whose client is gone, and return its last events; an empty list if there is no such request."""
        group = self._groups.get(request_id)
        return self._end_early(list(group.unfinished.values()), FinishReason.CANCELLED) if group else []

    def refuse(self, request_id: str, error: SharpError) -> Event:
        """End a waiting request, and return the event that tells its client `error`."""
        return self._fail(request_id, error)

    def end_overdue(self, now: float) -> list[Event]:
        """End the sequences whose time limit has passed at `now`, running or waiting; return their last events."""
        overdue = [
            sequence for sequence in self.sequences if sequence.deadline is not None and sequence.deadline <= now
        ]
        return self._end_early(overdue, FinishReason.TIME_LIMIT)

    def fail_all(self, sequences: Iterable[Sequence], error: Exception) -> list[Event]:
        """Fail the requests of `sequences`, whose step failed with `error`; return an event for each request."""
        self.failed_steps += 1
        failed = dict.fromkeys(sequence.request_id for sequence in sequences if not sequence.ended)
        logger.error("a step of %d requests failed", len(failed), exc_info=error)
        failure = EngineError(f"a step of the engine failed: {str(error) or type(error).__name__}")
        return [self._fail(request_id, failure) for request_id in failed]

    def commit(self, step: Step, result: StepResult, rows: AttentionRows | None) -> list[Event]:
        """Add the result of a step to its sequences, except ended ones, and return the events for their clients.

        `rows` are the step's attention statistics; None if none were collected.
        """
        observed = np.zeros(len(step.batch.positions), bool)
        events: list[Event] = []
        now, start = time.perf_counter(), 0
        self._finite.clear()
        for row, chunk in enumerate(step.chunks):
            if not chunk.sequence.ended:
                if not chunk.sequence.prompt.computed:
                    chunk.sequence.prompt.chunks.append(PromptChunk(chunk.tokens, step.began, step.sampled_at))
                commit = partial(self._commit_chunk, row, chunk, result, now, start, rows, observed)
                events += self._isolated(chunk.sequence.request_id, commit)
            start += chunk.width
        if self._finite:
            self.failed_steps = 0 if True in self._finite else self.failed_steps + 1
        if rows is not None:
            self.tally.attention.append(rows if observed.all() else rows.of(observed))
        return events

    def _commit_chunk(
        self,
        row: int,
        chunk: Chunk,
        result: StepResult,
        now: float,
        start: int,
        rows: AttentionRows | None,
        observed: NDArray[np.bool_],
    ) -> list[Event]:
        """Add the result of chunk number `row` to its sequence, and return the events for the client.

        The chunk's tokens begin at index `start` of the step's; those computed for the first time are marked in
        `observed`. `rows` are the step's attention statistics, None if none were collected. `now` is of
        `time.perf_counter`.
        """
        sequence, tokens = chunk.sequence, result.tokens.get(row, [])
        if NO_TOKEN in tokens:
            return [self._fail(sequence.request_id, self._why_no_token(sequence))]
        if tokens:
            self._finite.add(True)
        before, seen = sequence.computed, sequence.observed
        self._blocks.register(sequence.number, *sequence.advance(chunk.tokens))
        sequence.prompt.logprobs += result.prompt_logprobs.get(row, [])
        delta, ending = self._append(sequence, tokens, result.logprobs.get(row))
        # Only tokens that are computed for the first time and belong to the text are observed. Tokens from the prefix
        # cache were computed, and counted, for another request.
        new = slice(start + max(seen - before, 0), start + sequence.computed - before)
        observed[new] = True
        if rows is not None and sequence.request.attention and new.start < new.stop:
            sequence.observe(rows.of(new))
        events: list[Event] = []
        if not sequence.prompt.computed and sequence.computed >= len(sequence.request.prompt_ids):
            events += self._prompt_computed(sequence)
        if delta is not None:
            if rows is not None and sequence.request.attention_per_token:
                last = start + chunk.tokens - 1
                of_tokens = rows.of(slice(last, last + len(delta.token_ids)))
                delta = replace(delta, attention=TokenEntropies.of(of_tokens))
            self._count(sequence, chunk, delta, now)
            events.append(delta)
        if ending is not None:
            events.append(self._finish(sequence, *ending))
        elif not sequence.request.max_new_tokens and sequence.computed == len(sequence.token_ids):
            # A request without new tokens ends when its prompt is computed.
            events.append(self._finish(sequence, FinishReason.LENGTH))
        return events

    def _append(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> tuple[Delta | None, Ending | None]:
        """Append the tokens of a step: the first sampled token, then accepted draft tokens (computed already).

        Tokens after one that ends the sequence are left out. Return the new text and tokens, and how the sequence
        ended; None, if there are no tokens, or if it goes on.
        """
        if not tokens:
            return None, None
        texts: list[str] = []
        ending: Ending | None = None
        for position, token in enumerate(tokens):
            if position:
                self._blocks.register(sequence.number, *sequence.advance(1))
            text, ending = sequence.append(token)
            texts.append(text)
            if ending:
                break
        added = tuple(tokens[: len(texts)])
        of_added = tuple(logprobs[: len(texts)]) if logprobs else None
        return Delta(sequence.request_id, "".join(texts), added, sequence.index, of_added), ending

    def _count(self, sequence: Sequence, chunk: Chunk, delta: Delta, now: float) -> None:
        """Record for the metrics the tokens that a chunk added to the sequence, `delta`, and their time `now`."""
        added = len(delta.token_ids)
        self.tally.generated_tokens += added
        self.tally.draft_tokens += len(chunk.draft)
        self.tally.accepted_tokens += added - 1
        times = sequence.times
        if times.last_token is None:
            times.first_token = now
            self.tally.first_token.append(Timed(now - times.arrived, sequence.request_id))
        else:
            each = Timed((now - times.last_token) / added, sequence.request_id)
            self.tally.inter_token += [each] * added
        times.last_token = now

    def _why_no_token(self, sequence: Sequence) -> SharpError:
        """Return the error of a sequence for which no token could be sampled.

        The reason is its guide, its masks, or logits that are NaN or infinite; then its blocks leave the prefix cache.
        """
        guide = sequence.sampling.guide
        if guide and guide.error:
            return InputError(f"the completion cannot follow guided: {guide.error}")
        if masks_all(SamplingRow(sequence), self._vocab_size):
            return InputError(ALL_MASKED)
        self._finite.add(False)
        self._blocks.unregister(sequence.number)  # sequences that share these blocks would fail as well
        return EngineError("the model gave logits that are not finite for this request")

    def _prompt_computed(self, sequence: Sequence) -> list[Event]:
        """Queue the other sequences of a request, now that its prompt is cached, and report the prompt.

        Return an event about the prompt for the request's first sequence, and an empty list for the others.
        """
        sequence.prompt.computed = True
        if sequence.index:
            return []
        self.tally.prompt_tokens += len(sequence.request.prompt_ids)
        group, prompt = self._groups[sequence.request_id], sequence.prompt
        for other in group.held:
            other.prompt.cached_tokens = prompt.cached_tokens
            other.attention = sequence.attention
            self._scheduler.add(other)
        group.held = []
        logprobs = None if sequence.request.params.prompt_logprobs is None else tuple(prompt.logprobs)
        return [PromptComputed(sequence.request_id, prompt.cached_tokens or 0, tuple(prompt.chunks), logprobs)]

    def _finish(self, sequence: Sequence, reason: FinishReason, matched: str | int | None = None) -> Event:
        """End a sequence and return its event. `matched` is the stop string or stop token that ended it."""
        now = time.perf_counter()
        sequence.ended = True
        unfinished = self._groups[sequence.request_id].unfinished
        del unfinished[sequence.index]
        self._scheduler.remove(sequence)
        if not unfinished:
            del self._groups[sequence.request_id]
            self.tally.finished.append(Ended(str(reason), now - sequence.times.arrived, sequence.request_id))
        self.tally.completed.append(sequence.completed())
        return sequence.finished(reason, matched, now, last=not unfinished)

    def _fail(self, request_id: str, error: SharpError) -> Event:
        """End a request and all its sequences with an error, and return the event that tells its client."""
        sequences = list(self._groups.pop(request_id).unfinished.values())
        for sequence in sequences:
            sequence.ended = True
            self._scheduler.remove(sequence)
        self.tally.finished.append(Ended("error", time.perf_counter() - sequences[0].times.arrived, request_id))
        return Failed(request_id, error)

    def _end_early(self, sequences: Iterable[Sequence], reason: FinishReason) -> list[Event]:
        """End unfinished sequences for `reason`; return events with the text that was held back, and Finished."""

        def end(sequence: Sequence) -> list[Event]:
            """Return the last events of a sequence: its held text, and the end."""
            text, _ = sequence.stop.flush()
            rest: list[Event] = [Delta(sequence.request_id, text, (), sequence.index)] if text else []
            return [*rest, self._finish(sequence, reason)]

        return [
            event for sequence in sequences for event in self._isolated(sequence.request_id, partial(end, sequence))
        ]

    def _isolated(self, request_id: str, events: Callable[[], list[Event]]) -> list[Event]:
        """Return the events of a request. An exception, such as a tokenizer defect, fails this request and no other."""
        if request_id not in self._groups:  # the request has failed, because of another of its sequences
            return []
        try:
            return events()
        except Exception as error:
            logger.exception("request %s failed", request_id)
            return [self._fail(request_id, EngineError(f"the request failed: {str(error) or type(error).__name__}"))]
