"""`RunningRequests`: the requests that have not ended, and what steps make of them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.sampling import NO_TOKEN
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
    """The unfinished sequences of a request, by index, and those of them that wait for the first to read the prompt."""

    unfinished: dict[int, Sequence]
    held: list[Sequence]


class RunningRequests:
    """Commits steps to the sequences of requests, and ends requests; each change is an event of its request.

    Attributes:
        failed_steps: steps, one after the other, that failed or whose logits were finite for no request.
        tally: what happened since the last report.
    """

    def __init__(self, scheduler: Scheduler, blocks: BlockManager, vocab_size: int) -> None:
        self.failed_steps = 0
        self.tally = Tally()
        self._scheduler = scheduler
        self._blocks = blocks
        self._vocab_size = vocab_size
        self._groups: dict[str, _SequenceGroup] = {}
        self._finite: set[bool] = set()  # what was found in a step

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All that are not finished."""
        return (sequence for group in self._groups.values() for sequence in group.unfinished.values())

    @property
    def held(self) -> int:
        """How many sequences wait for the first of their request to read the prompt."""
        return sum(len(group.held) for group in self._groups.values())

    def add(self, request_id: str, sequences: list[Sequence]) -> None:
        """Queue the sequences of a request: the first one now."""
        self._groups[request_id] = _SequenceGroup(dict(enumerate(sequences)), sequences[1:])
        self._scheduler.add(sequences[0])

    def cancel(self, request_id: str) -> list[Event]:
        """End a request whose client has gone; no event means that there is none."""
        group = self._groups.get(request_id)
        return self._end_early(list(group.unfinished.values()), FinishReason.CANCELLED) if group else []

    def end_overdue(self, now: float) -> list[Event]:
        """End the sequences whose time limit is over, running or not."""
        overdue = [one for one in self.sequences if one.deadline is not None and one.deadline <= now]
        return self._end_early(overdue, FinishReason.TIME_LIMIT)

    def fail_all(self, sequences: Iterable[Sequence], error: Exception) -> list[Event]:
        """Fail the requests of a step that failed."""
        self.failed_steps += 1
        failed = dict.fromkeys(sequence.request_id for sequence in sequences if not sequence.ended)
        logger.error("a step of %d requests failed", len(failed), exc_info=error)
        failure = EngineError(f"a step of the engine failed: {str(error) or type(error).__name__}")
        return [self._fail(request_id, failure) for request_id in failed]

    def commit(self, step: Step, result: StepResult, rows: AttentionRows | None) -> list[Event]:
        """Take over what a step gave to its sequences, but for those that have ended meanwhile."""
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
        """Take over what was computed for a chunk, whose tokens begin at `start`, and mark those to be `observed`."""
        sequence, tokens = chunk.sequence, result.tokens.get(row, [])
        if NO_TOKEN in tokens:
            return [self._fail(sequence.request_id, self._why_no_token(sequence))]
        if tokens:
            self._finite.add(True)
        before, seen = sequence.computed, sequence.observed
        self._blocks.register(sequence.number, *sequence.advance(chunk.tokens))
        sequence.prompt.logprobs += result.prompt_logprobs.get(row, [])
        delta, ending = self._append(sequence, tokens, result.logprobs.get(row))
        # Those that were computed for the first time and are part of the text. What the prefix cache had was computed
        # for another request and counts there.
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
            # Nothing to generate: the request only reads its prompt.
            events.append(self._finish(sequence, FinishReason.LENGTH))
        return events

    def _append(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> tuple[Delta | None, Ending | None]:
        """Add the tokens of a step: one, and the accepted draft tokens after it, which are computed already."""
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
        """Note new tokens and their times for the metrics."""
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
        guide = sequence.sampling.guide
        if guide and guide.error:
            return InputError(f"the completion cannot follow guided: {guide.error}")
        if masks_all(SamplingRow(sequence), self._vocab_size):
            return InputError(ALL_MASKED)
        self._finite.add(False)
        self._blocks.unregister(sequence.number)  # who shares them would fail as well
        return EngineError("the model gave logits that are not finite for this request")

    def _prompt_computed(self, sequence: Sequence) -> list[Event]:
        """The prompt is in the cache: the request's other sequences can start from there."""
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
        """End a request with all its sequences."""
        sequences = list(self._groups.pop(request_id).unfinished.values())
        for sequence in sequences:
            sequence.ended = True
            self._scheduler.remove(sequence)
        self.tally.finished.append(Ended("error", time.perf_counter() - sequences[0].times.arrived, request_id))
        return Failed(request_id, error)

    def _end_early(self, sequences: Iterable[Sequence], reason: FinishReason) -> list[Event]:
        """End unfinished sequences, with the text that was held back."""

        def end(sequence: Sequence) -> list[Event]:
            text, _ = sequence.stop.flush()
            rest: list[Event] = [Delta(sequence.request_id, text, (), sequence.index)] if text else []
            return [*rest, self._finish(sequence, reason)]

        return [event for one in sequences for event in self._isolated(one.request_id, partial(end, one))]

    def _isolated(self, request_id: str, events: Callable[[], list[Event]]) -> list[Event]:
        """The events of a request; what raises, say a defect of a tokenizer, loses this request and no other."""
        if request_id not in self._groups:  # another sequence of the request has failed
            return []
        try:
            return events()
        except Exception as error:
            logger.exception("request %s failed", request_id)
            return [self._fail(request_id, EngineError(f"the request failed: {str(error) or type(error).__name__}"))]
