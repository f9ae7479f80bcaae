"""`Engine`: runs requests together, one step at a time."""

import logging
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest
from sharp.serving.attention import AttentionRows
from sharp.serving.backends import Backend, StepOutput
from sharp.serving.config import EngineConfig
from sharp.serving.engine.batch import pack
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.events import Accepted, Delta, Event, Failed, FinishReason
from sharp.serving.engine.report import EngineReport
from sharp.serving.engine.sampler import NO_TOKEN, sample
from sharp.serving.engine.scheduler import Chunk, Plan, Scheduler
from sharp.serving.engine.sequence import Sequence
from sharp.serving.errors import AlreadyExistsError, EngineError
from sharp.serving.request import Request
from sharp.serving.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class _Tally:
    """What happened since the last report."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: list[tuple[str, float]] = field(default_factory=list)
    queue_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    inter_token_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    attention: list[AttentionRows] = field(default_factory=list)


class Engine:
    """Turns requests into tokens. Not safe for threads: one owns it and nobody else touches it.

    A step is a transaction: plan -> reserve -> run -> sample -> commit. Until commit no sequence has changed, so a
    failure before it loses only the requests of that step and leaves the rest as it was.
    """

    def __init__(
        self, backend: Backend, manifest: Manifest, tokenizer: Tokenizer | None, blocks: int, config: EngineConfig
    ) -> None:
        """Serve the model of `backend` with a cache of `blocks` blocks."""
        backend.allocate_cache(blocks)
        self.blocks = BlockManager(blocks, manifest.cache.block_size)
        self.scheduler = Scheduler(self.blocks, config.max_batch_tokens, config.max_sequences)
        self._backend = backend
        self._tokenizer = tokenizer
        self._eos_token_ids = manifest.tokenizer.eos_token_ids
        self._attention_interval = config.attention_interval
        self._sequences: dict[str, Sequence] = {}
        self._steps = 0
        self._tally = _Tally()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._sequences)

    def add(self, request: Request) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request of that id is still there.
        """
        if request.request_id in self._sequences:
            raise AlreadyExistsError(f"request_id {request.request_id!r} belongs to a request that is still running")
        sequence = Sequence(request, self._tokenizer, self._eos_token_ids)
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        return Accepted(request.request_id, len(request.prompt_ids))

    def abort(self, request_id: str) -> list[Event]:
        """End a request and free its blocks; no event means that there is no such request."""
        sequence = self._sequences.get(request_id)
        return [self._finish(sequence, FinishReason.CANCELLED, None)] if sequence else []

    def step(self) -> list[Event]:
        """Compute one step; return what happened to the requests in it. A failure is an event too."""
        began = time.perf_counter()
        plan = self.scheduler.plan()
        self.scheduler.reserve(plan)
        self._tally.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            if sequence.started is None:
                sequence.started = began
                self._tally.queue_seconds.append(began - sequence.arrived)
        outputs = [
            row
            for row, chunk in enumerate(plan.chunks)
            if chunk.tokens == chunk.sequence.remaining and chunk.sequence.request.max_new_tokens
        ]
        try:
            output, positions = self._run(plan, outputs)
            sampling = [plan.chunks[row].sequence for row in outputs]
            token_ids = sample(output.logits[: len(outputs)], sampling).tolist()
        except Exception as error:  # whatever a runtime raises must not end the engine
            return self._roll_back(plan, error)
        events = self._commit(plan, dict(zip(outputs, token_ids, strict=True)), output.stats, positions)
        self._tally.step_seconds.append(time.perf_counter() - began)
        return events

    def _run(self, plan: Plan, outputs: list[int]) -> tuple[StepOutput, NDArray[np.int64]]:
        sampled = self._attention_interval and self._steps % self._attention_interval == 0
        wanted = any(chunk.sequence.request.attention for chunk in plan.chunks)
        self._steps += 1
        batch = pack(plan.chunks, self.blocks, outputs, collect_stats=bool(sampled or wanted))
        return self._backend.step(batch), batch.positions

    def _roll_back(self, plan: Plan, error: Exception) -> list[Event]:
        logger.error("a step of %d requests failed", len(plan.chunks), exc_info=error)
        failure = EngineError(f"a step of the engine failed: {error}")
        now = time.perf_counter()
        return [self._fail(chunk.sequence, failure, now) for chunk in plan.chunks]

    def _fail(self, sequence: Sequence, error: EngineError, now: float) -> Event:
        self._drop(sequence)
        self._tally.finished.append(("error", now - sequence.arrived))
        return Failed(sequence.request_id, error)

    def _commit(
        self,
        plan: Plan,
        token_ids: dict[int, int],
        stats: NDArray[np.float32] | None,
        positions: NDArray[np.int64],
    ) -> list[Event]:
        if stats is not None:
            self._observe(plan.chunks, AttentionRows(stats, positions))
        events: list[Event] = []
        now = time.perf_counter()
        for row, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            sequence.computed += chunk.tokens
            sequence.observed = max(sequence.observed, sequence.computed)
            if token_ids.get(row) == NO_TOKEN:
                broken = EngineError("the model gave logits that are not finite for this request")
                events.append(self._fail(sequence, broken, now))
            elif row in token_ids:
                events.extend(self._append(sequence, token_ids[row], now))
            elif sequence.remaining == 0:  # nothing to generate: the request only reads its prompt
                self._tally.prompt_tokens += len(sequence.request.prompt_ids)
                events.append(self._finish(sequence, FinishReason.LENGTH, None))
        return events

    def _append(self, sequence: Sequence, token_id: int, now: float) -> list[Event]:
        self._tally.generated_tokens += 1
        if sequence.first_token is None or sequence.last_token is None:
            sequence.first_token = now
            self._tally.prompt_tokens += len(sequence.request.prompt_ids)
            self._tally.first_token_seconds.append(now - sequence.arrived)
        else:
            self._tally.inter_token_seconds.append(now - sequence.last_token)
        sequence.last_token = now
        text, ending = sequence.append(token_id)
        delta = Delta(sequence.request_id, text, (token_id,))
        return [delta, self._finish(sequence, *ending)] if ending else [delta]

    def _observe(self, chunks: tuple[Chunk, ...], rows: AttentionRows) -> None:
        """Hand on the statistics of the tokens that were computed for the first time."""
        seen_before = np.zeros(len(rows.positions), bool)
        start = 0
        for chunk in chunks:
            sequence = chunk.sequence
            repeated = min(max(sequence.observed - sequence.computed, 0), chunk.tokens)
            seen_before[start : start + repeated] = True
            new = slice(start + repeated, start + chunk.tokens)
            if sequence.request.attention and repeated < chunk.tokens:
                sequence.observe(AttentionRows(rows.stats[:, new], rows.positions[new]))
            start += chunk.tokens
        if seen_before.any():
            rows = AttentionRows(rows.stats[:, ~seen_before], rows.positions[~seen_before])
        self._tally.attention.append(rows)

    def _finish(self, sequence: Sequence, reason: FinishReason, matched: str | int | None) -> Event:
        now = time.perf_counter()
        self._drop(sequence)
        self._tally.finished.append((str(reason), now - sequence.arrived))
        return sequence.finished(reason, matched, now)

    def _drop(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.remove(sequence)

    def report(self) -> EngineReport:
        """What happened since the last report."""
        tally, self._tally = self._tally, _Tally()
        return EngineReport(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            cache_usage=self.blocks.usage,
            prompt_tokens=tally.prompt_tokens,
            generated_tokens=tally.generated_tokens,
            preemptions=tally.preemptions,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            finished=tuple(tally.finished),
            queue_seconds=tuple(tally.queue_seconds),
            first_token_seconds=tuple(tally.first_token_seconds),
            inter_token_seconds=tuple(tally.inter_token_seconds),
            step_seconds=tuple(tally.step_seconds),
            attention=tuple(tally.attention),
        )
