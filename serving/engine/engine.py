"""`Engine`: runs requests together, one step at a time."""

import logging
import time
from collections import Counter
from functools import partial

import numpy as np

from sharp.plugins.manifest import Manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.errors import AlreadyExistsError, DeviceLostError, QueueFullError
from sharp.serving.api.events import Accepted, Event
from sharp.serving.api.request import GenerateRequest
from sharp.serving.backends import Backend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.block_manager import BlockHashes, BlockManager, first_hash
from sharp.serving.engine.queue_limit import QueueLimit
from sharp.serving.engine.report import EngineReport, Tally, Timed
from sharp.serving.engine.runner import StepRunner, asynchronous
from sharp.serving.engine.running_requests import RunningRequests
from sharp.serving.engine.scheduler import Plan, Scheduler
from sharp.serving.engine.sequence import Sequence
from sharp.serving.engine.speculation import speculative_tokens
from sharp.serving.engine.step import Step, StepResult
from sharp.serving.text.stop_condition import StopCondition
from sharp.serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# As many as take hardly longer than one, as the weights are read anyway; of a GPU it was not measured.
PREFILL_CHUNK_TOKENS = {"cpu": 64, "cuda": 512}


class Engine:
    """Turns requests into tokens. Not safe for threads: one owns it and nobody else touches it.

    A step is a transaction: plan and reserve -> run -> sample -> commit. Until commit no sequence has a new token and
    no block a hash, so a failure before it loses only the requests of that step and leaves the rest as it was.

    With asynchronous scheduling the next step is planned while one runs, and runs while that one is committed. What it
    computes of a sequence that has ended meanwhile is thrown away.
    """

    def __init__(
        self, backend: Backend, manifest: Manifest, tokenizer: Tokenizer | None, blocks: int, config: EngineConfig
    ) -> None:
        """Serve the model of `backend` with a cache of `blocks` blocks."""
        self._runner = StepRunner(backend, ahead=asynchronous(config, backend))
        self._runner.call(partial(backend.allocate_cache, blocks))
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
        self.interrupted = False  # the last call of `step` returned before its step was there
        self._manifest = manifest
        self._windows = np.array(manifest.windows, np.int64) if manifest.windows else None
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(token for token in manifest.tokenizer.eos_token_ids if token < manifest.vocab_size)
        self._config = config
        self._requests = RunningRequests(self.scheduler, self.blocks, manifest.vocab_size)
        self._numbered = 0
        self._steps = 0

    @property
    def failed_steps(self) -> int:
        """How many steps failed, or had finite logits for no request, one after the other."""
        return self._requests.failed_steps

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests)

    def add(self, request: GenerateRequest) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request of that id is still there.
            QueueFullError: too much waits already.
        """
        with self._runner.lock:
            accepted = self._add(request)
            if len(self.scheduler.running) < self._config.max_sequences:  # it may run already in the next step
                self._runner.withdraw()
        return accepted

    def _add(self, request: GenerateRequest) -> Accepted:
        if request.request_id in self._requests:
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
            self._requests.tally.refused += 1
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
        self._requests.add(request.request_id, sequences)
        return Accepted(request.request_id, len(request.prompt_ids))

    def abort(self, request_id: str) -> list[Event]:
        """End a request and free its blocks; no event means that there is no such request."""
        with self._runner.lock:
            events = self._requests.cancel(request_id)
            if events:
                self._runner.withdraw()  # the step that is planned may be about it
            return events

    def interrupt(self) -> None:
        """Let a call of `step` that waits for the backend return. Any thread may call this."""
        self._runner.interrupt()

    def close(self) -> None:
        """Wait until the backend computes nothing; a step that it computes is thrown away."""
        with self._runner.lock:
            self._runner.close()

    def step(self) -> list[Event]:
        """Compute one step; return what happened to the requests in it. A failure is an event too.

        With asynchronous scheduling the backend is at the next step when this returns.

        Raises:
            DeviceLostError: no step can be computed any more.
        """
        with self._runner.lock:
            self.interrupted = False
            events = self._requests.end_overdue(time.perf_counter())
            if events:
                self._runner.withdraw()
            if self._runner.current is None:
                events += self._start()
                if self._runner.current is None:
                    return events
            self._plan_ahead()
            taken = self._runner.take()
            self.interrupted = taken is None
            return events if taken is None else events + self._take(taken)

    def _start(self) -> list[Event]:
        """Start a step, unless there is nothing to do or it fails here; return what happened to its requests then."""
        try:
            plan = self._plan()
        except Exception as error:
            # Who is to blame is not known. Where nobody runs it is the first that waits: it would be tried for ever.
            return self._requests.fail_all(self.scheduler.running or self.scheduler.waiting[:1], error)
        if not plan.chunks:
            return []
        try:
            self._runner.start(self._pack(plan))
        except Exception as error:
            return self._requests.fail_all([chunk.sequence for chunk in plan.chunks], error)
        return []

    def _plan_ahead(self) -> None:
        """Plan the step that follows the one that runs, if its tokens need not be known for that."""
        if not self._runner.may_follow:
            return
        try:
            plan = self._plan()
            if plan.chunks:
                self._runner.follow(self._pack(plan))
        except Exception:  # it is planned again once the step that runs is committed, and fails there
            logger.debug("a step could not be planned ahead", exc_info=True)

    def _plan(self) -> Plan:
        plan, now = self.scheduler.schedule(), time.perf_counter()
        self._requests.tally.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            self._admit(sequence, now)
        return plan

    def _pack(self, plan: Plan) -> Step:
        interval, number = self._config.attention_interval, self._steps + len(self._runner.steps)
        collected = interval > 0 and number % interval == 0
        return Step(plan.chunks, self.blocks, before=self._runner.current, collect_stats=collected)

    def _take(self, step: Step) -> list[Event]:
        """Commit a step that the backend is done with."""
        self._steps += 1
        try:
            result = step.result()
            rows = self._attention_rows(step, result)
        except DeviceLostError:  # who goes on would fail every request and look ready for more
            raise
        except Exception as error:  # whatever a runtime raises must not end the engine
            return self._requests.fail_all([chunk.sequence for chunk in step.chunks], error)
        events = self._requests.commit(step, result, rows)
        self._requests.tally.step_seconds.append(step.sampled_at - step.began)
        return events

    def _admit(self, sequence: Sequence, now: float) -> None:
        if sequence.times.started is not None:
            return
        sequence.times.started = now
        self._queue_limit.admitted(len(sequence.token_ids), now)
        self._requests.tally.queue.append(Timed(now - sequence.times.arrived, sequence.request_id))
        if sequence.index == 0:
            self._requests.tally.prefix_cache_queries += len(sequence.request.prompt_ids)
            self._requests.tally.prefix_cache_hits += sequence.prompt.cached_tokens or 0

    def _attention_rows(self, step: Step, result: StepResult) -> AttentionRows | None:
        stats = result.stats
        return None if stats is None else AttentionRows(stats, step.batch.positions, self._windows)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless blocks, queues, requests and the steps under way agree."""
        with self._runner.lock:
            self._check_integrity()

    def _check_integrity(self) -> None:
        self.blocks.check_integrity()
        launched: Counter[Sequence] = Counter()
        for step in self._runner.steps:
            launched.update({chunk.sequence: chunk.tokens for chunk in step.chunks})
        if wrong := [one.request_id for one in self._requests.sequences if one.launched != launched[one]]:
            raise RuntimeError(f"requests {wrong[:16]} count other tokens under way than the steps do")
        if not self.has_work and (self.blocks.usage or self.scheduler.running or self.scheduler.waiting):
            raise RuntimeError(f"the engine is idle and {self.blocks.usage:.0%} of the blocks are held")

    def report(self) -> EngineReport:
        """What happened since the last report."""
        tally, self._requests.tally = self._requests.tally, Tally()
        waiting = len(self.scheduler.waiting) + self._requests.held
        return tally.report(len(self.scheduler.running), waiting, self.blocks.usage)
