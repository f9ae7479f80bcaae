"""`Engine`: runs requests together, one step at a time."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.plugins.sampling import NO_TOKEN
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.errors import AlreadyExistsError, EngineError, InputError, SharpError
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
from sharp.serving.api.request import Request
from sharp.serving.backends import Backend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.adjust import leaves_none
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.computation import Result, compute
from sharp.serving.engine.place import Place
from sharp.serving.engine.prefix import PrefixChain, chain_start
from sharp.serving.engine.queue_limit import QueueLimit
from sharp.serving.engine.report import Ended, EngineReport, Tally, Timed
from sharp.serving.engine.scheduler import Chunk, Plan, Scheduler
from sharp.serving.engine.sequence import Ending, Sequence
from sharp.serving.engine.speculation import speculative_tokens
from sharp.serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# As many as take hardly longer than one, as the weights are read anyway; of a GPU it was not measured.
PREFILL_CHUNK_TOKENS = {"cpu": 64, "cuda": 512}


@dataclass
class _Answers:
    """The answers of a request that are not complete, and those of them that wait for the first to read the prompt."""

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
        self._answers: dict[str, _Answers] = {}
        self._numbered = 0
        self._steps = 0
        self._tally = Tally()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._answers)

    def add(self, request: Request) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request of that id is still there.
            QueueFullError: too much waits already.
        """
        if request.request_id in self._answers:
            raise AlreadyExistsError(f"request_id {request.request_id!r} belongs to a request that is still running")
        self._queue_limit.check(request, self.scheduler.waiting)
        # Without a prefix cache only the answers of one request share blocks: nobody else has its number.
        salt = request.cache_salt if self._config.prefix_cache else f"request {self._numbered}"
        start = chain_start(self._manifest, salt)
        sequences = [
            Sequence(
                request,
                self._numbered + index,
                index,
                PrefixChain(start, self.blocks.block_size),
                self._tokenizer,
                self._eos_token_ids,
            )
            for index in range(request.params.n)
        ]
        self._numbered += len(sequences)
        self._answers[request.request_id] = _Answers(dict(enumerate(sequences)), sequences[1:])
        self.scheduler.add(sequences[0])
        return Accepted(request.request_id, len(request.prompt_ids))

    def abort(self, request_id: str) -> list[Event]:
        """End a request and free its blocks; no event means that there is no such request."""
        answers = self._answers.get(request_id)
        return self._cut(list(answers.unfinished.values()), FinishReason.CANCELLED) if answers else []

    def step(self) -> list[Event]:
        """Compute one step; return what happened to the requests in it. A failure is an event too."""
        began = time.perf_counter()
        events = self._end_late(began)
        try:
            plan = self._plan(began)
        except Exception as error:
            # Who is to blame is not known. Where nobody runs it is the first that waits: it would be tried for ever.
            return events + self._lose(self.scheduler.running or self.scheduler.waiting[:1], error)
        if not plan.chunks:
            return events
        try:
            result = self._compute(plan)
        except Exception as error:  # whatever a runtime raises must not end the engine
            return events + self._lose([chunk.sequence for chunk in plan.chunks], error)
        events += self._commit(plan, result, began)
        self._tally.step_seconds.append(time.perf_counter() - began)
        return events

    def _plan(self, now: float) -> Plan:
        plan = self.scheduler.schedule()
        self._tally.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            self._admit(sequence, now)
        return plan

    def _lose(self, sequences: Iterable[Sequence], error: Exception) -> list[Event]:
        """Fail the requests of a step that failed."""
        failed = dict.fromkeys(sequence.request_id for sequence in sequences)
        logger.exception("a step of %d requests failed", len(failed))
        failure = EngineError(f"a step of the engine failed: {error}")
        return [self._fail(request_id, failure) for request_id in failed]

    def _end_late(self, now: float) -> list[Event]:
        """End the answers whose time is over, running or not."""
        late = [
            sequence
            for answers in self._answers.values()
            for sequence in answers.unfinished.values()
            if sequence.deadline is not None and sequence.deadline <= now
        ]
        return self._cut(late, FinishReason.TIME_LIMIT)

    def _cut(self, sequences: Iterable[Sequence], reason: FinishReason) -> list[Event]:
        """End answers before their time, with the text that was held back."""

        def end(sequence: Sequence) -> list[Event]:
            text = sequence.cut()
            rest: list[Event] = [Delta(sequence.request_id, text, (), sequence.index)] if text else []
            return [*rest, self._finish(sequence, reason)]

        return [event for one in sequences for event in self._alone(one.request_id, partial(end, one))]

    def _alone(self, request_id: str, events: Callable[[], list[Event]]) -> list[Event]:
        """The events of a request; what raises, say a defect of a tokenizer, loses this request and no other."""
        if request_id not in self._answers:  # another answer of the request has failed
            return []
        try:
            return events()
        except Exception as error:
            logger.exception("request %s failed", request_id)
            return [self._fail(request_id, EngineError(f"the request failed: {error}"))]

    def _admit(self, sequence: Sequence, now: float) -> None:
        if sequence.started is not None:
            return
        sequence.started = now
        self._queue_limit.admitted(sequence, now)
        self._tally.queue.append(Timed(now - sequence.arrived, sequence.request_id))
        if sequence.index == 0:
            self._tally.prefix_cache_queries += len(sequence.request.prompt_ids)
            self._tally.prefix_cache_hits += sequence.cached_tokens or 0

    def _compute(self, plan: Plan) -> Result:
        interval = self._config.attention_interval
        sampled = interval > 0 and self._steps % interval == 0
        self._steps += 1
        return compute(plan.chunks, self.blocks, self._backend, sampled=sampled)

    def _commit(self, plan: Plan, result: Result, began: float) -> list[Event]:
        stats = result.output.stats
        rows = None if stats is None else AttentionRows(stats, result.positions, self._windows)
        observed = np.zeros(len(result.positions), bool)
        events: list[Event] = []
        now, start = time.perf_counter(), 0
        for row, chunk in enumerate(plan.chunks):
            if not chunk.sequence.prompt_read:
                chunk.sequence.prompt_chunks.append(PromptChunk(chunk.tokens, began, now))
            commit = partial(self._commit_chunk, row, chunk, result, now, start, rows, observed)
            events += self._alone(chunk.sequence.request_id, commit)
            start += chunk.width
        if rows is not None:
            self._tally.attention.append(rows if observed.all() else rows.of(observed))
        return events

    def _commit_chunk(
        self,
        row: int,
        chunk: Chunk,
        result: Result,
        now: float,
        start: int,
        rows: AttentionRows | None,
        observed: NDArray[np.bool_],
    ) -> list[Event]:
        """Take over what was computed for a chunk, whose tokens begin at `start`, and mark those to be `observed`."""
        sequence, tokens = chunk.sequence, result.tokens.get(row, [])
        if NO_TOKEN in tokens:
            return [self._fail(sequence.request_id, self._why_no_token(sequence))]
        before, seen = sequence.computed, sequence.observed
        self.blocks.remember(sequence.number, *sequence.advance(chunk.tokens))
        sequence.prompt_logprobs += result.prompt_logprobs.get(row, [])
        delta, ending = self._append(sequence, tokens, result.logprobs.get(row))
        # Those that were computed for the first time and are part of the text. What the prefix cache had was computed
        # for another request and counts there.
        new = slice(start + max(seen - before, 0), start + sequence.computed - before)
        observed[new] = True
        if rows is not None and sequence.request.attention and new.start < new.stop:
            sequence.observe(rows.of(new))
        events: list[Event] = []
        if not sequence.prompt_read and sequence.computed >= len(sequence.request.prompt_ids):
            events += self._prompt_read(sequence)
        if delta is not None:
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
        """Add the tokens of a step: one, and those after it that were guessed and so are computed already."""
        if not tokens:
            return None, None
        texts: list[str] = []
        ending: Ending | None = None
        for place, token in enumerate(tokens):
            if place:
                self.blocks.remember(sequence.number, *sequence.advance(1))
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
        if sequence.last_token is None:
            sequence.first_token = now
            self._tally.first_token.append(Timed(now - sequence.arrived, sequence.request_id))
        else:
            each = Timed((now - sequence.last_token) / added, sequence.request_id)
            self._tally.inter_token += [each] * added
        sequence.last_token = now

    def _why_no_token(self, sequence: Sequence) -> SharpError:
        if sequence.guide and sequence.guide.error:
            return InputError(f"the answer cannot follow guided: {sequence.guide.error}")
        if leaves_none(Place(sequence), self._manifest.vocab_size):
            return InputError("min_tokens is not reached, and every token that may follow ends the answer")
        self.blocks.forget(sequence.number)  # who shares them would fail as well
        return EngineError("the model gave logits that are not finite for this request")

    def _prompt_read(self, sequence: Sequence) -> list[Event]:
        """The prompt is in the cache: the request's other answers can start from there."""
        sequence.prompt_read = True
        if sequence.index:
            return []
        self._tally.prompt_tokens += len(sequence.request.prompt_ids)
        answers = self._answers[sequence.request_id]
        for other in answers.held:
            other.cached_tokens = sequence.cached_tokens
            other.attention = sequence.attention
            self.scheduler.add(other)
        answers.held = []
        wanted = sequence.request.params.prompt_logprobs is not None
        logprobs = tuple(sequence.prompt_logprobs) if wanted else None
        chunks = tuple(sequence.prompt_chunks)
        return [PromptComputed(sequence.request_id, sequence.cached_tokens or 0, chunks, logprobs)]

    def _finish(self, sequence: Sequence, reason: FinishReason, matched: str | int | None = None) -> Event:
        now = time.perf_counter()
        unfinished = self._answers[sequence.request_id].unfinished
        del unfinished[sequence.index]
        self.scheduler.remove(sequence)
        if not unfinished:
            del self._answers[sequence.request_id]
            self._tally.finished.append(Ended(str(reason), now - sequence.arrived, sequence.request_id))
        return sequence.finished(reason, matched, now, last=not unfinished)

    def _fail(self, request_id: str, error: SharpError) -> Event:
        """Lose a request with all its answers."""
        answers = list(self._answers.pop(request_id).unfinished.values())
        for sequence in answers:
            self.scheduler.remove(sequence)
        self._tally.finished.append(Ended("error", time.perf_counter() - answers[0].arrived, request_id))
        return Failed(request_id, error)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless blocks, queues and requests agree."""
        self.blocks.check_integrity()
        if not self.has_work and (self.blocks.usage or self.scheduler.running or self.scheduler.waiting):
            raise RuntimeError(f"the engine is idle and {self.blocks.usage:.0%} of the blocks are held")

    def report(self) -> EngineReport:
        """What happened since the last report."""
        tally, self._tally = self._tally, Tally()
        held = sum(len(answers.held) for answers in self._answers.values())
        return tally.report(len(self.scheduler.running), len(self.scheduler.waiting) + held, self.blocks.usage)
