"""`Engine`: runs requests together in batches, one step at a time."""

import logging
import time
from collections import Counter
from functools import partial

import numpy as np

from sharp.core.manifest import Manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.errors import AlreadyExistsError, DeviceLostError, QueueFullError
from sharp.serving.api.events import Accepted, Event
from sharp.serving.api.request import GenerateRequest
from sharp.serving.backends import DecoderBackend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.block_manager import BlockHashes, BlockManager, first_hash
from sharp.serving.engine.queue_limit import QueueLimit
from sharp.serving.engine.report import EngineReport, Tally, Timed
from sharp.serving.engine.runner import StepRunner, asynchronous
from sharp.serving.engine.running_requests import RunningRequests
from sharp.serving.engine.scheduler import Scheduler, StepPlan
from sharp.serving.engine.sequence import Sequence
from sharp.serving.engine.speculation import speculative_tokens
from sharp.serving.engine.step import Step, StepResult
from sharp.serving.text.stop_condition import StopCondition
from sharp.serving.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# On a CPU, a chunk of 64 tokens takes hardly longer than a single token, because every step reads all weights anyway.
# The number for GPUs is not measured.
PREFILL_CHUNK_TOKENS = {"cpu": 64, "cuda": 512}


class Engine:
    """The engine, which turns requests into tokens. Not thread-safe: only the thread that owns it may use it.

    A step is a transaction: plan and reserve -> run -> sample -> commit. Before the commit no sequence has a new token
    and no block a hash, so a failure before the commit loses only the requests of that step and changes no others.

    With asynchronous scheduling the engine plans the next step while the current step runs, and commits the current
    step while the next step runs. Results for a sequence that has ended meanwhile are discarded.
    """

    def __init__(
        self,
        backend: DecoderBackend,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        blocks: int,
        config: EngineConfig,
    ) -> None:
        """Serve the model of `backend` with a cache of `blocks` blocks, which are allocated here.

        Raises:
            InputError: the device does not run the model.
        """
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
        self.interrupted = False  # the last call of `step` returned before its result was ready
        self._manifest = manifest
        self._windows = np.array(manifest.windows, np.int64) if manifest.windows else None
        self._tokenizer = tokenizer
        self._eos_token_ids = manifest.tokenizer.eos_token_ids
        self._config = config
        self._requests = RunningRequests(self.scheduler, self.blocks, manifest.vocab_size)
        self._pushed_out: list[Event] = []  # last events of requests that gave way in the queue to another client
        self._numbered = 0
        self._steps = 0

    @property
    def failed_steps(self) -> int:
        """The number of consecutive steps that failed, or in which no request had finite logits."""
        return self._requests.failed_steps

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do something."""
        return bool(self._requests or self._pushed_out)

    def add(self, request: GenerateRequest) -> Accepted:
        """Queue a request that `ModelFolder.prepare` has prepared.

        Raises:
            AlreadyExistsError: a request with the same id is unfinished.
            QueueFullError: too many sequences or prompt tokens are waiting, and no other client has more of them.
        """
        with self._runner.lock:
            accepted = self._add(request)
            if len(self.scheduler.running) < self._config.max_sequences:  # the new request may join the next step
                self._runner.withdraw()
        return accepted

    def _add(self, request: GenerateRequest) -> Accepted:
        """Queue a request, which may push out less urgent ones if the queue is full; return its acceptance.

        Raises:
            AlreadyExistsError: its id is in use.
            QueueFullError: the queue has no room.
        """
        if request.request_id in self._requests:
            raise AlreadyExistsError(f"request_id {request.request_id!r} belongs to a request that is still running")
        client = request.client if self._config.fair_shares else ""
        while True:
            # The first sequence of a request with `n` completions stands for all `n` until it starts, and each of them
            # has its own copy of the prompt.
            waiting = [
                (1 if sequence.times.started or sequence.index else sequence.request.params.n, len(sequence.token_ids))
                for sequence in self.scheduler.waiting
            ]
            try:
                self._queue_limit.check(
                    request.params.n,
                    request.params.n * len(request.prompt_ids),
                    sum(n for n, _ in waiting),
                    sum(n * tokens for n, tokens in waiting),
                )
                break
            except QueueFullError as error:
                self._requests.tally.refused += 1
                if not self._push_out(client, request.params.n, error):
                    raise
        # Without a prefix cache, only sequences of the same request may share blocks: the salt contains the request's
        # number, which no other request has.
        salt = request.cache_salt if self._config.prefix_cache else f"request {self._numbered}"
        start = first_hash(self._manifest, salt, request.isolation)
        sequences = [
            Sequence(
                request,
                self._numbered + index,
                index,
                BlockHashes(start, self.blocks.block_size),
                StopCondition(request.params, self._tokenizer, self._eos_token_ids, request.prompt_ids[-1]),
                client,
                request.priority if self._config.priorities else 0,
            )
            for index in range(request.params.n)
        ]
        self._numbered += len(sequences)
        self._requests.add(request.request_id, sequences)
        return Accepted(request.request_id, len(request.prompt_ids))

    def _push_out(self, client: str, sequences: int, error: QueueFullError) -> bool:
        """Refuse the last waiting request of the client with most waiting sequences.

        Return False, and refuse none, unless `client` would have fewer waiting sequences with `sequences` more. The
        refused request gets `error` as its last event.
        """
        longest = self.scheduler.waiting.longest()
        new = [sequence for sequence in longest if sequence.times.started is None and not sequence.index]
        if not new or len(longest) <= self.scheduler.waiting.waiting_of(client) + sequences:
            return False
        self._pushed_out.append(self._requests.refuse(new[-1].request_id, error))
        return True

    def abort(self, request_id: str) -> list[Event]:
        """End a request, free its blocks and return its last events. The list is empty if there is no such request."""
        with self._runner.lock:
            events = self._requests.cancel(request_id)
            if events:
                self._runner.withdraw()  # the planned step may contain the request
            return events

    def interrupt(self) -> None:
        """Make a call of `step` that waits for the backend return early. Any thread may call this."""
        self._runner.interrupt()

    def close(self) -> None:
        """Wait until the backend is idle, and discard the step that it was computing."""
        with self._runner.lock:
            self._runner.close()

    def step(self) -> list[Event]:
        """Compute one step and return the events of its requests. A failure is an event, too.

        With asynchronous scheduling, the backend already computes the next step when this method returns.

        Raises:
            DeviceLostError: the GPU is lost, so no further step can be computed.
        """
        with self._runner.lock:
            self.interrupted = False
            events, self._pushed_out = self._pushed_out, []
            events += self._requests.end_overdue(time.perf_counter())
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
        """Start a step if there is work. Return the events of its requests if starting it failed."""
        try:
            plan = self._plan()
        except Exception as error:
            # The error does not say which request caused it, so all running requests fail. If none is running, the
            # first in the queue fails; otherwise it would be retried forever.
            return self._requests.fail_all(self.scheduler.running or self.scheduler.waiting.first(1), error)
        if not plan.chunks:
            return []
        try:
            self._runner.start(self._pack(plan))
        except Exception as error:
            return self._requests.fail_all([chunk.sequence for chunk in plan.chunks], error)
        return []

    def _plan_ahead(self) -> None:
        """Plan the step that follows the running one, unless the plan depends on the tokens of the running step."""
        if not self._runner.may_follow:
            return
        try:
            plan = self._plan()
            if plan.chunks:
                self._runner.follow(self._pack(plan))
        # The same plan is made again after the running step is committed, and reports its error then.
        except Exception:
            logger.debug("a step could not be planned ahead", exc_info=True)

    def _plan(self) -> StepPlan:
        """Plan the next step, and count preemptions and admissions."""
        plan, now = self.scheduler.schedule(), time.perf_counter()
        self._requests.tally.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            self._admit(sequence, now)
        return plan

    def _pack(self, plan: StepPlan) -> Step:
        """Return the step of a plan. Attention statistics are collected every `attention_interval` steps."""
        interval, number = self._config.attention_interval, self._steps + len(self._runner.steps)
        collected = interval > 0 and number % interval == 0
        return Step(plan.chunks, self.blocks, before=self._runner.current, collect_stats=collected)

    def _take(self, step: Step) -> list[Event]:
        """Commit a step that the backend has finished, and return the events of its requests.

        If the step failed, its requests fail. DeviceLostError is raised.
        """
        self._steps += 1
        try:
            result = step.result()
            rows = self._attention_rows(step, result)
        # An engine that went on would fail every request and still look ready.
        except DeviceLostError:
            raise
        except Exception as error:  # no exception of a runtime may end the engine
            return self._requests.fail_all([chunk.sequence for chunk in step.chunks], error)
        events = self._requests.commit(step, result, rows)
        self._requests.tally.step_seconds.append(step.sampled_at - step.began)
        return events

    def _admit(self, sequence: Sequence, now: float) -> None:
        """Record the start of a sequence at time `now` (perf_counter), once: queue time and prefix cache hits."""
        if sequence.times.started is not None:
            return
        sequence.times.started = now
        self._queue_limit.admitted(len(sequence.token_ids), now)
        self._requests.tally.queue.append(Timed(now - sequence.times.arrived, sequence.request_id))
        if sequence.index == 0:
            self._requests.tally.prefix_cache_queries += len(sequence.request.prompt_ids)
            self._requests.tally.prefix_cache_hits += sequence.prompt.cached_tokens or 0

    def _attention_rows(self, step: Step, result: StepResult) -> AttentionRows | None:
        """Return a step's attention statistics with the positions of its tokens; None if it collected none."""
        stats = result.stats
        return None if stats is None else AttentionRows(stats, step.batch.positions, self._windows)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless blocks, queues, requests and unfinished steps are consistent."""
        with self._runner.lock:
            self._check_integrity()

    def _check_integrity(self) -> None:
        """Check the engine's invariants: blocks, launched tokens, and nothing held when idle.

        RuntimeError if violated.
        """
        self.blocks.check_integrity()
        launched: Counter[Sequence] = Counter()
        for step in self._runner.steps:
            launched.update({chunk.sequence: chunk.tokens for chunk in step.chunks})
        if wrong := [
            sequence.request_id for sequence in self._requests.sequences if sequence.launched != launched[sequence]
        ]:
            raise RuntimeError(f"requests {wrong[:16]} count other tokens under way than the steps do")
        if not self.has_work and (self.blocks.usage or self.scheduler.running or self.scheduler.waiting):
            raise RuntimeError(f"the engine is idle and {self.blocks.usage:.0%} of the blocks are held")

    def report(self) -> EngineReport:
        """Return what happened since the last report, and reset the tally."""
        tally, self._requests.tally = self._requests.tally, Tally()
        waiting = len(self.scheduler.waiting) + self._requests.held
        return tally.report(len(self.scheduler.running), waiting, self.blocks.usage)
