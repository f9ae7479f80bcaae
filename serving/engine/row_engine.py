"""`RowEngine`: computes the rows of requests in shared batches, for models without a cache."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sharp.core.manifest import Manifest
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.errors import AlreadyExistsError, DeviceLostError, EngineError, QueueFullError, SharpError
from sharp.serving.api.events import (
    Accepted,
    ComputedRows,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptChunk,
    PromptComputed,
    Timing,
    Usage,
)
from sharp.serving.api.request import Request
from sharp.serving.backends.rows import RowBackend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.queue_limit import QueueLimit
from sharp.serving.engine.report import Ended, EngineReport, Tally, Timed
from sharp.serving.engine.virtual_times import VirtualTimes

logger = logging.getLogger(__name__)

# A batch is chosen from at most WINDOW rows: those of the client whose turn it is first (`virtual_times`), with at most
# WINDOW_OF_REQUEST rows of each of its requests, in rotation. A request of two thousand rows therefore delays a later
# request by only one or two batches, and so does a client with a thousand requests.
WINDOW, WINDOW_OF_REQUEST = 512, 64
NOT_FINITE = "the model gave numbers that are not finite for this request"


class RowRequest(Request, Protocol):
    """A request that is computed row by row. A row is a text, a set or a sequence."""

    @property
    def row_tokens(self) -> Sequence[int]:
        """The number of tokens of each row."""

    @property
    def client(self) -> str:
        """The name of the client, whose share of the server the request uses."""


R = TypeVar("R", bound=RowRequest)


@dataclass
class RunningRequest(Generic[R]):
    """A request in the engine: its waiting rows, sorted by length, and the outputs of its computed rows, by index.

    It `arrived` and `started` (None: not yet) at these seconds of `time.perf_counter`; `chunks` are the steps so far.
    """

    request: R
    arrived: float
    client: str = ""
    waiting: "list[WaitingRow[R]]" = field(default_factory=list)
    rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    started: float | None = None
    chunks: list[PromptChunk] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class WaitingRow(Generic[R]):
    """A row of a request, with its index in the request and its number of tokens."""

    request: RunningRequest[R]
    index: int
    tokens: int


@dataclass(frozen=True)
class ComputedBatch:
    """The results of a batch: output float32 [rows, ...], the number of padding tokens, and statistics if collected."""

    rows: NDArray[np.float32]  # [rows, ...]
    padding: int
    attention: AttentionRows | None


class RowEngine(ABC, Generic[R]):
    """An engine that turns the rows of requests into numbers. A subclass chooses and computes the batches.

    Not thread-safe: only the thread that owns the engine may use it. It has the methods of `Engine`, so that
    `EngineThread` runs either.
    """

    def __init__(self, backend: RowBackend, manifest: Manifest, config: EngineConfig, batch_tokens: int) -> None:
        """Limit a batch to `batch_tokens` tokens, unless a single row is longer."""
        self._backend = backend
        self._windows = np.array(manifest.windows, np.int64) if manifest.windows else None
        self._config = config
        self.batch_tokens = batch_tokens
        self._queue_limit = QueueLimit(config.max_waiting_requests, config.max_waiting_tokens)
        self._requests: dict[str, RunningRequest[R]] = {}  # of a client, the next request to compute is the first
        self._times = VirtualTimes()
        self._pushed_out: list[Event] = []  # events of requests that lost their place to another client's
        self._waiting_tokens = 0
        self._steps = 0
        self.failed_steps = 0  # consecutive failed steps
        self.interrupted = False  # always False: `step` computes its batch in the calling thread
        self._tally = Tally()

    @abstractmethod
    def _choose(self, waiting: Sequence[WaitingRow[R]]) -> list[WaitingRow[R]]:
        """Return the next batch: the first waiting row, and the rows to compute with it."""

    @abstractmethod
    def _compute(self, batch: list[WaitingRow[R]], *, collect_stats: bool) -> ComputedBatch:
        """Compute a batch, with attention statistics if `collect_stats`."""

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do something."""
        return bool(self._requests or self._pushed_out)

    def add(self, request: R) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request with the same id is unfinished.
            QueueFullError: too many requests or tokens are waiting, and no other client has more of them.
        """
        if request.request_id in self._requests:
            raise AlreadyExistsError(f"request_id {request.request_id!r} belongs to a request that is still running")
        client = request.client if self._config.fair_shares else ""
        while True:
            not_started = self._not_started()
            waiting = sum(map(len, not_started.values()))
            try:
                self._queue_limit.check(1, request.prompt_tokens, waiting, self._waiting_tokens)
                break
            except QueueFullError as error:
                self._tally.refused += 1
                longest = max(not_started.values(), key=len)
                if len(longest) < len(not_started.get(client, [])) + 2:
                    raise
                self._pushed_out += self._fail([longest[-1]], error)
        if not any(running.client == client for running in self._requests.values()):
            self._times.enter(client)
        running = RunningRequest(request, time.perf_counter(), client)
        rows = [WaitingRow(running, index, tokens) for index, tokens in enumerate(request.row_tokens)]
        running.waiting = sorted(rows, key=lambda row: row.tokens)
        self._requests[request.request_id] = running
        self._waiting_tokens += request.prompt_tokens
        return Accepted(request.request_id, request.prompt_tokens)

    def abort(self, request_id: str) -> list[Event]:
        """End a request and return its last event. The list is empty if there is no such request."""
        running = self._forget(request_id)
        return [] if running is None else [self._finished(running, FinishReason.CANCELLED)]

    def step(self) -> list[Event]:
        """Compute one batch and return the events of its requests. A failure is an event, too.

        Call this method only if `has_work`.

        Raises:
            DeviceLostError: the GPU is lost, so no further batch can be computed.
        """
        began = time.perf_counter()
        pushed_out, self._pushed_out = self._pushed_out, []
        if not self._requests:
            return pushed_out
        batch = self._choose(self._window())
        self._begin(batch, began)
        interval = self._config.attention_interval
        collect = interval > 0 and self._steps % interval == 0
        self._steps += 1
        try:
            computed = self._compute(batch, collect_stats=collect)
        except DeviceLostError:
            raise
        except Exception as error:  # no exception of a runtime may end the engine
            logger.exception("a batch of %d rows failed", len(batch))
            self.failed_steps += 1
            failure = EngineError(f"a batch of the model failed: {str(error) or type(error).__name__}")
            return pushed_out + self._fail([row.request for row in batch], failure)
        now = time.perf_counter()
        self._count(batch, computed, now - began)
        return pushed_out + self._take(batch, computed.rows, began, now)

    def interrupt(self) -> None:
        """Do nothing, because `step` never waits."""

    def close(self) -> None:
        """Do nothing, because nothing is computed outside `step`."""

    def _window(self) -> list[WaitingRow[R]]:
        """Return the rows from which the next batch is chosen. The batch must contain the first."""
        window: list[WaitingRow[R]] = []
        for running in sorted(self._requests.values(), key=lambda running: self._times[running.client]):
            window += running.waiting[:WINDOW_OF_REQUEST]
            if len(window) >= WINDOW:
                break
        return window

    def _not_started(self) -> dict[str, list[RunningRequest[R]]]:
        """Return the requests of every client, of which no row has been computed, in the order of arrival."""
        found: dict[str, list[RunningRequest[R]]] = {}
        for running in self._requests.values():
            if running.started is None:
                found.setdefault(running.client, []).append(running)
        return found

    def _begin(self, batch: list[WaitingRow[R]], now: float) -> None:
        """Remove a batch from the waiting rows, and move the request whose turn it was to the end.

        `now` is the start of the step, in seconds of `time.perf_counter`.
        """
        first = batch[0].request.request.request_id
        self._requests[first] = self._requests.pop(first)
        for row in batch:
            self._times.charge(row.request.client, row.tokens)
        self._waiting_tokens -= sum(row.tokens for row in batch)
        chosen = set(batch)
        for running in {row.request.request.request_id: row.request for row in batch}.values():
            running.waiting[:WINDOW_OF_REQUEST] = [
                row for row in running.waiting[:WINDOW_OF_REQUEST] if row not in chosen
            ]
            if running.started is None:
                running.started = now
                self._queue_limit.admitted(running.request.prompt_tokens, now)
                self._tally.queue.append(Timed(now - running.arrived, running.request.request_id))

    def _count(self, batch: list[WaitingRow[R]], computed: ComputedBatch, seconds: float) -> None:
        """Add a computed batch to the tally: tokens, padding, time and attention statistics."""
        self._tally.prompt_tokens += sum(row.tokens for row in batch)
        self._tally.padding_tokens += computed.padding
        self._tally.batch_texts.append(len(batch))
        self._tally.step_seconds.append(seconds)
        if computed.attention is not None:
            self._tally.attention.append(computed.attention)

    def _take(self, batch: list[WaitingRow[R]], rows: NDArray[np.float32], began: float, now: float) -> list[Event]:
        """Store the outputs of a batch in their requests, and end the requests that are complete.

        `rows` has the output of each row of the batch. The step took from `began` to `now`, in seconds of
        `time.perf_counter`. A request with a row that is not finite fails.
        """
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(rows).reshape(len(rows), -1).all(axis=1))
        self.failed_steps = 0 if finite.any() else self.failed_steps + 1
        not_finite = [row.request for row, is_finite in zip(batch, finite, strict=True) if not is_finite]
        events = self._fail(not_finite, EngineError(NOT_FINITE))
        tokens: dict[str, int] = {}
        for row, values in zip(batch, rows, strict=True):
            row.request.rows[row.index] = values
            request_id = row.request.request.request_id
            tokens[request_id] = tokens.get(request_id, 0) + row.tokens
        for request_id, count in tokens.items():
            running = self._requests.get(request_id)
            if running is None:  # the request has failed
                continue
            running.chunks.append(PromptChunk(count, began, now))
            if len(running.rows) == len(running.request.row_tokens):
                self._forget(request_id)
                whole = np.stack([running.rows[index] for index in range(len(running.rows))])
                events.append(PromptComputed(request_id, 0, tuple(running.chunks)))
                events.append(ComputedRows(request_id, whole))
                events.append(self._finished(running, FinishReason.STOP))
        return events

    def _fail(self, requests: list[RunningRequest[R]], error: SharpError) -> list[Event]:
        """End the requests of these rows with an error, and return one event for each request."""
        events: list[Event] = []
        for request_id in dict.fromkeys(running.request.request_id for running in requests):
            running = self._forget(request_id)
            if running is not None:
                self._tally.finished.append(Ended("error", time.perf_counter() - running.arrived, request_id))
                events.append(Failed(request_id, error))
        return events

    def _forget(self, request_id: str) -> RunningRequest[R] | None:
        """Remove a request with its waiting rows and return it; None if it is not running."""
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._waiting_tokens -= sum(row.tokens for row in running.waiting)
            if not any(other.client == running.client for other in self._requests.values()):
                self._times.leave(running.client)
        return running

    def _finished(self, running: RunningRequest[R], reason: FinishReason) -> Finished:
        """Count the end of a request and return its event, with the times since its arrival in seconds."""
        total = time.perf_counter() - running.arrived
        queue = None if running.started is None else running.started - running.arrived
        request = running.request
        self._tally.finished.append(Ended(str(reason), total, request.request_id))
        return Finished(
            request.request_id, reason, None, Usage(request.prompt_tokens, 0), Timing(queue, None, total), None
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the number of waiting tokens agrees with the requests."""
        waiting = sum(row.tokens for running in self._requests.values() for row in running.waiting)
        if waiting != self._waiting_tokens:
            raise RuntimeError(f"{waiting} tokens wait in the engine, which counts {self._waiting_tokens}")

    def report(self) -> EngineReport:
        """Return what happened since the last report, and reset the tally."""
        tally, self._tally = self._tally, Tally()
        running = sum(request.started is not None for request in self._requests.values())
        return tally.report(running, len(self._requests) - running, 0.0)
