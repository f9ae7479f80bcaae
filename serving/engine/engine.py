"""`Engine`: runs requests together, one step at a time."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.plugins.sampling import NO_TOKEN
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.errors import (
    AlreadyExistsError,
    DeviceLostError,
    EngineError,
    InputError,
    QueueFullError,
    SharpError,
)
from sharp.serving.api.events import (
    Accepted,
    Delta,
    Event,
    Failed,
    FinishReason,
    PromptChunk,
    PromptComputed,
    TokenLogprobs,
)
from sharp.serving.api.request import GenerateRequest
from sharp.serving.backends import Backend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.block_manager import BlockHashes, BlockManager, first_hash
from sharp.serving.engine.queue_limit import QueueLimit
from sharp.serving.engine.report import Ended, EngineReport, Tally, Timed
from sharp.serving.engine.sampler import SamplingRow, masks_all
from sharp.serving.engine.scheduler import Chunk, Plan, Scheduler
from sharp.serving.engine.sequence import Ending, Sequence
from sharp.serving.engine.speculation import speculative_tokens
from sharp.serving.engine.step import StepResult, run_step
from sharp.serving.text.stop_condition import StopCondition
from sharp.serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# As many as take hardly longer than one, as the weights are read anyway; of a GPU it was not measured.
PREFILL_CHUNK_TOKENS = {"cpu": 64, "cuda": 512}
ALL_MASKED = "no token may follow: guided, allowed_token_ids, bad_words and min_tokens leave none"


@dataclass
class _SequenceGroup:
    """The unfinished sequences of a request, by index, and those of them that wait for the first to read the prompt."""

    unfinished: dict[int, Sequence]
    held: list[Sequence]


class Engine:
    """Turns requests into tokens. Not safe for threads: one owns it and nobody else touches it.

    A step is a transaction: plan and reserve -> run -> sample -> commit. Until commit no sequence has a new token and
    no block a hash, so a failure before it loses only the requests of that step and leaves the rest as it was.
    """

    def __init__(
        self, backend: Backend, manifest: Manifest, tokenizer: Tokenizer | None, blocks: int, config: EngineConfig
    ) -> None:
        """Serve the model of `backend` with a cache of `blocks` blocks."""
        backend.allocate_cache(blocks)
        self.speculative_tokens = speculative_tokens(config, backend, manifest)
        self.prefill_chunk_tokens = config.prefill_chunk_tokens or PREFILL_CHUNK_TOKENS[backend.device]
        self.blocks = BlockManager(blocks, manifest.cache.block_size)
        self.scheduler = Scheduler(
            self.blocks,
            config.max_batch_tokens,
            config.max_sequences,
            self.prefill_chunk_tokens,
            self.speculative_tokens,
        )
        self._queue_limit = QueueLimit(config.max_waiting_requests, config.max_waiting_tokens)
        self._backend = backend
        self._manifest = manifest
        self._windows = np.array(manifest.windows, np.int64) if manifest.windows else None
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(token for token in manifest.tokenizer.eos_token_ids if token < manifest.vocab_size)
        self._config = config
        self._groups: dict[str, _SequenceGroup] = {}
        self._numbered = 0
        self._steps = 0
        # One after the other, which failed or whose logits were finite for no request.
        self.failed_steps = 0
        self._finite: set[bool] = set()  # what was found in a step
        self._tally = Tally()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._groups)

    def add(self, request: GenerateRequest) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request of that id is still there.
            QueueFullError: too much waits already.
        """
        if request.request_id in self._groups:
            raise AlreadyExistsError(f"request_id {request.request_id!r} belongs to a request that is still running")
        # Each sequence has its own copy of the prompt.
        waiting = [
            (1 if one.times.started or one.index else one.request.params.n, len(one.token_ids))
            for one in self.scheduler.waiting
        ]
        try:
            self._queue_limit.check(
                request.params.n,
                request.params.n * len(request.prompt_ids),
                sum(n for n, _ in waiting),
                sum(n * tokens for n, tokens in waiting),
            )
        except QueueFullError:
            self._tally.refused += 1
            raise
        # Without a prefix cache only the sequences of one request share blocks: no other has its number.
        salt = request.cache_salt if self._config.prefix_cache else f"request {self._numbered}"
        start = first_hash(self._manifest, salt)
        sequences = [
            Sequence(
                request,
                self._numbered + index,
                index,
                BlockHashes(start, self.blocks.block_size),
                StopCondition(request.params, self._tokenizer, self._eos_token_ids, request.prompt_ids[-1]),
            )
            for index in range(request.params.n)
        ]
        self._numbered += len(sequences)
        self._groups[request.request_id] = _SequenceGroup(dict(enumerate(sequences)), sequences[1:])
        self.scheduler.add(sequences[0])
        return Accepted(request.request_id, len(request.prompt_ids))

    def abort(self, request_id: str) -> list[Event]:
        """End a request and free its blocks; no event means that there is no such request."""
        group = self._groups.get(request_id)
        return self._end_early(list(group.unfinished.values()), FinishReason.CANCELLED) if group else []

    def step(self) -> list[Event]:
        """Compute one step; return what happened to the requests in it. A failure is an event too.

        Raises:
            DeviceLostError: no step can be computed any more.
        """
        began = time.perf_counter()
        events = self._end_overdue(began)
        try:
            plan = self._plan(began)
        except Exception as error:
            # Who is to blame is not known. Where nobody runs it is the first that waits: it would be tried for ever.
            return events + self._fail_all(self.scheduler.running or self.scheduler.waiting[:1], error)
        if not plan.chunks:
            return events
        try:
            result = self._run(plan)
            rows = self._attention_rows(result)
        except DeviceLostError:  # who goes on would fail every request and look ready for more
            raise
        except Exception as error:  # whatever a runtime raises must not end the engine
            return events + self._fail_all([chunk.sequence for chunk in plan.chunks], error)
        events += self._commit(plan, result, rows, began)
        self._tally.step_seconds.append(time.perf_counter() - began)
        return events

    def _plan(self, now: float) -> Plan:
        plan = self.scheduler.schedule()
        self._tally.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            self._admit(sequence, now)
        return plan

    def _fail_all(self, sequences: Iterable[Sequence], error: Exception) -> list[Event]:
        """Fail the requests of a step that failed."""
        self.failed_steps += 1
        failed = dict.fromkeys(sequence.request_id for sequence in sequences)
        logger.exception("a step of %d requests failed", len(failed))
        failure = EngineError(f"a step of the engine failed: {str(error) or type(error).__name__}")
        return [self._fail(request_id, failure) for request_id in failed]

    def _end_overdue(self, now: float) -> list[Event]:
        """End the sequences whose time limit is over, running or not."""
        overdue = [
            sequence
            for group in self._groups.values()
            for sequence in group.unfinished.values()
            if sequence.deadline is not None and sequence.deadline <= now
        ]
        return self._end_early(overdue, FinishReason.TIME_LIMIT)

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

    def _admit(self, sequence: Sequence, now: float) -> None:
        if sequence.times.started is not None:
            return
        sequence.times.started = now
        self._queue_limit.admitted(len(sequence.token_ids), now)
        self._tally.queue.append(Timed(now - sequence.times.arrived, sequence.request_id))
        if sequence.index == 0:
            self._tally.prefix_cache_queries += len(sequence.request.prompt_ids)
            self._tally.prefix_cache_hits += sequence.prompt.cached_tokens or 0

    def _run(self, plan: Plan) -> StepResult:
        interval = self._config.attention_interval
        sampled = interval > 0 and self._steps % interval == 0
        self._steps += 1
        return run_step(plan.chunks, self.blocks, self._backend, collect_stats=sampled)

    def _attention_rows(self, result: StepResult) -> AttentionRows | None:
        stats = result.output.stats
        return None if stats is None else AttentionRows(stats, result.positions, self._windows)

    def _commit(self, plan: Plan, result: StepResult, rows: AttentionRows | None, began: float) -> list[Event]:
        observed = np.zeros(len(result.positions), bool)
        events: list[Event] = []
        now, start = time.perf_counter(), 0
        self._finite.clear()
        for row, chunk in enumerate(plan.chunks):
            if not chunk.sequence.prompt.computed:
                chunk.sequence.prompt.chunks.append(PromptChunk(chunk.tokens, began, now))
            commit = partial(self._commit_chunk, row, chunk, result, now, start, rows, observed)
            events += self._isolated(chunk.sequence.request_id, commit)
            start += chunk.width
        if self._finite:
            self.failed_steps = 0 if True in self._finite else self.failed_steps + 1
        if rows is not None:
            self._tally.attention.append(rows if observed.all() else rows.of(observed))
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
        self.blocks.register(sequence.number, *sequence.advance(chunk.tokens))
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
                delta = replace(delta, attention=rows.of(slice(last, last + len(delta.token_ids))))
            self._count(sequence, chunk, delta, now)
            events.append(delta)
        if ending is not None:
            events.append(self._finish(sequence, *ending))
        elif not tokens and sequence.remaining == 0:  # nothing to generate: the request only reads its prompt
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
                self.blocks.register(sequence.number, *sequence.advance(1))
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
        self._tally.generated_tokens += added
        self._tally.draft_tokens += len(chunk.draft)
        self._tally.accepted_tokens += added - 1
        times = sequence.times
        if times.last_token is None:
            times.first_token = now
            self._tally.first_token.append(Timed(now - times.arrived, sequence.request_id))
        else:
            each = Timed((now - times.last_token) / added, sequence.request_id)
            self._tally.inter_token += [each] * added
        times.last_token = now

    def _why_no_token(self, sequence: Sequence) -> SharpError:
        guide = sequence.sampling.guide
        if guide and guide.error:
            return InputError(f"the completion cannot follow guided: {guide.error}")
        if masks_all(SamplingRow(sequence), self._manifest.vocab_size):
            return InputError(ALL_MASKED)
        self._finite.add(False)
        self.blocks.unregister(sequence.number)  # who shares them would fail as well
        return EngineError("the model gave logits that are not finite for this request")

    def _prompt_computed(self, sequence: Sequence) -> list[Event]:
        """The prompt is in the cache: the request's other sequences can start from there."""
        sequence.prompt.computed = True
        if sequence.index:
            return []
        self._tally.prompt_tokens += len(sequence.request.prompt_ids)
        group, prompt = self._groups[sequence.request_id], sequence.prompt
        for other in group.held:
            other.prompt.cached_tokens = prompt.cached_tokens
            other.attention = sequence.attention
            self.scheduler.add(other)
        group.held = []
        logprobs = None if sequence.request.params.prompt_logprobs is None else tuple(prompt.logprobs)
        return [PromptComputed(sequence.request_id, prompt.cached_tokens or 0, tuple(prompt.chunks), logprobs)]

    def _finish(self, sequence: Sequence, reason: FinishReason, matched: str | int | None = None) -> Event:
        now = time.perf_counter()
        unfinished = self._groups[sequence.request_id].unfinished
        del unfinished[sequence.index]
        self.scheduler.remove(sequence)
        if not unfinished:
            del self._groups[sequence.request_id]
            self._tally.finished.append(Ended(str(reason), now - sequence.times.arrived, sequence.request_id))
        self._tally.completed.append(sequence.completed())
        return sequence.finished(reason, matched, now, last=not unfinished)

    def _fail(self, request_id: str, error: SharpError) -> Event:
        """End a request with all its sequences."""
        sequences = list(self._groups.pop(request_id).unfinished.values())
        for sequence in sequences:
            self.scheduler.remove(sequence)
        self._tally.finished.append(Ended("error", time.perf_counter() - sequences[0].times.arrived, request_id))
        return Failed(request_id, error)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless blocks, queues and requests agree."""
        self.blocks.check_integrity()
        if not self.has_work and (self.blocks.usage or self.scheduler.running or self.scheduler.waiting):
            raise RuntimeError(f"the engine is idle and {self.blocks.usage:.0%} of the blocks are held")

    def report(self) -> EngineReport:
        """What happened since the last report."""
        tally, self._tally = self._tally, Tally()
        held = sum(len(group.held) for group in self._groups.values())
        return tally.report(len(self.scheduler.running), len(self.scheduler.waiting) + held, self.blocks.usage)
