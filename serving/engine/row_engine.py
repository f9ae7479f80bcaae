"""`RowEngine`: computes the rows of requests in batches that several share, for models without a cache."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

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
from sharp.serving.config import EngineConfig
from sharp.serving.engine.queue_limit import QueueLimit
from sharp.serving.engine.report import Ended, EngineReport, Tally, Timed

logger = logging.getLogger(__name__)

# Batches are chosen from so many rows, and so many of each request, in rotation: a request of two thousand rows delays
# one that comes after it by a batch or two.
WINDOW, WINDOW_OF_REQUEST = 512, 64
NOT_FINITE = "the model gave numbers that are not finite for this request"


class RowRequest(Request, Protocol):
    """A request that is computed row by row; a row is a text, a set or a sequence."""

    @property
    def row_tokens(self) -> Sequence[int]:
        """How many tokens each of its rows has."""


R = TypeVar("R", bound=RowRequest)


@dataclass
class RunningRequest(Generic[R]):
    """A request in the engine: its rows that wait, by their length, and the outputs of those that are computed."""

    request: R
    arrived: float
    waiting: "list[WaitingRow[R]]" = field(default_factory=list)
    rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    started: float | None = None
    chunks: list[PromptChunk] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class WaitingRow(Generic[R]):
    """A row of a request, the one of that `index`, and its tokens."""

    request: RunningRequest[R]
    index: int
    tokens: int


@dataclass(frozen=True)
class ComputedBatch:
    """What a batch gave: a row of numbers for each of its rows, tokens of padding, and statistics where collected."""

    rows: NDArray[np.float32]  # [rows, ...]
    padding: int
    attention: AttentionRows | None


class RowEngine(ABC, Generic[R]):
    """Turns the rows of requests into numbers. A child says which rows go together, and computes them.

    Not safe for threads: one owns it. It has the verbs of `Engine`, so that `EngineThread` runs either.
    """

    def __init__(self, config: EngineConfig, batch_tokens: int) -> None:
        """`batch_tokens` are the most of a batch, except where one row is longer."""
        self._config = config
        self.batch_tokens = batch_tokens
        self._queue_limit = QueueLimit(config.max_waiting_requests, config.max_waiting_tokens)
        self._requests: dict[str, RunningRequest[R]] = {}  # the next one first
        self._waiting_tokens = 0
        self._steps = 0
        self.failed_steps = 0  # one after the other
        self.interrupted = False  # never: a batch is computed where `step` is called
        self._tally = Tally()

    @abstractmethod
    def _choose(self, waiting: Sequence[WaitingRow[R]]) -> list[WaitingRow[R]]:
        """The next batch: the first that waits, and those that go with it."""

    @abstractmethod
    def _compute(self, batch: list[WaitingRow[R]], *, collect_stats: bool) -> ComputedBatch:
        """Compute a batch."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests)

    def add(self, request: R) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request of that id is still there.
            QueueFullError: too much waits already.
        """
        if request.request_id in self._requests:
            raise AlreadyExistsError(f"request_id {request.request_id!r} belongs to a request that is still running")
        not_started = sum(one.started is None for one in self._requests.values())
        try:
            self._queue_limit.check(1, request.prompt_tokens, not_started, self._waiting_tokens)
        except QueueFullError:
            self._tally.refused += 1
            raise
        running = RunningRequest(request, time.perf_counter())
        rows = [WaitingRow(running, index, tokens) for index, tokens in enumerate(request.row_tokens)]
        running.waiting = sorted(rows, key=lambda row: row.tokens)
        self._requests[request.request_id] = running
        self._waiting_tokens += request.prompt_tokens
        return Accepted(request.request_id, request.prompt_tokens)

    def abort(self, request_id: str) -> list[Event]:
        """End a request; no event means that there is no such request."""
        running = self._forget(request_id)
        return [] if running is None else [self._finished(running, FinishReason.CANCELLED)]

    def step(self) -> list[Event]:
        """Compute one batch; return what happened to the requests in it. A failure is an event too.

        Raises:
            DeviceLostError: no batch can be computed any more.
        """
        began = time.perf_counter()
        batch = self._choose(self._window())
        self._begin(batch, began)
        interval = self._config.attention_interval
        collect = interval > 0 and self._steps % interval == 0
        self._steps += 1
        try:
            computed = self._compute(batch, collect_stats=collect)
        except DeviceLostError:
            raise
        except Exception as error:  # whatever a runtime raises must not end the engine
            logger.exception("a batch of %d rows failed", len(batch))
            self.failed_steps += 1
            return self._fail_all(
                batch, EngineError(f"a batch of the model failed: {str(error) or type(error).__name__}")
            )
        now = time.perf_counter()
        self._count(batch, computed, now - began)
        return self._take(batch, computed.rows, began, now)

    def interrupt(self) -> None:
        """Nothing: `step` does not wait."""

    def close(self) -> None:
        """Nothing: nothing is computed outside `step`."""

    def _window(self) -> list[WaitingRow[R]]:
        """The rows from which the next batch is chosen; the first of them must be in it."""
        window: list[WaitingRow[R]] = []
        for running in self._requests.values():
            window += running.waiting[:WINDOW_OF_REQUEST]
            if len(window) >= WINDOW:
                break
        return window

    def _begin(self, batch: list[WaitingRow[R]], now: float) -> None:
        """Take a batch out of what waits; the request whose turn it was is the last one now."""
        first = next(iter(self._requests))
        self._requests[first] = self._requests.pop(first)
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
        self._tally.prompt_tokens += sum(row.tokens for row in batch)
        self._tally.padding_tokens += computed.padding
        self._tally.batch_texts.append(len(batch))
        self._tally.step_seconds.append(seconds)
        if computed.attention is not None:
            self._tally.attention.append(computed.attention)

    def _take(self, batch: list[WaitingRow[R]], rows: NDArray[np.float32], began: float, now: float) -> list[Event]:
        """Give the rows of a batch to their requests, and end those that have all."""
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(rows).reshape(len(rows), -1).all(axis=1))
        self.failed_steps = 0 if finite.any() else self.failed_steps + 1
        events = self._fail_all(
            [row for row, is_finite in zip(batch, finite, strict=True) if not is_finite], EngineError(NOT_FINITE)
        )
        tokens: dict[str, int] = {}
        for row, values in zip(batch, rows, strict=True):
            row.request.rows[row.index] = values
            request_id = row.request.request.request_id
            tokens[request_id] = tokens.get(request_id, 0) + row.tokens
        for request_id, count in tokens.items():
            running = self._requests.get(request_id)
            if running is None:  # it has failed
                continue
            running.chunks.append(PromptChunk(count, began, now))
            if len(running.rows) == len(running.request.row_tokens):
                self._forget(request_id)
                whole = np.stack([running.rows[index] for index in range(len(running.rows))])
                events.append(PromptComputed(request_id, 0, tuple(running.chunks)))
                events.append(ComputedRows(request_id, whole))
                events.append(self._finished(running, FinishReason.STOP))
        return events

    def _fail_all(self, batch: list[WaitingRow[R]], error: SharpError) -> list[Event]:
        events: list[Event] = []
        for request_id in dict.fromkeys(row.request.request.request_id for row in batch):
            running = self._forget(request_id)
            if running is not None:
                self._tally.finished.append(Ended("error", time.perf_counter() - running.arrived, request_id))
                events.append(Failed(request_id, error))
        return events

    def _forget(self, request_id: str) -> RunningRequest[R] | None:
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._waiting_tokens -= sum(row.tokens for row in running.waiting)
        return running

    def _finished(self, running: RunningRequest[R], reason: FinishReason) -> Finished:
        total = time.perf_counter() - running.arrived
        queue = None if running.started is None else running.started - running.arrived
        request = running.request
        self._tally.finished.append(Ended(str(reason), total, request.request_id))
        return Finished(
            request.request_id, reason, None, Usage(request.prompt_tokens, 0), Timing(queue, None, total), None
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless what waits and the requests agree."""
        waiting = sum(row.tokens for running in self._requests.values() for row in running.waiting)
        if waiting != self._waiting_tokens:
            raise RuntimeError(f"{waiting} tokens wait in the engine, which counts {self._waiting_tokens}")

    def report(self) -> EngineReport:
        """What happened since the last report."""
        tally, self._tally = self._tally, Tally()
        running = sum(one.started is not None for one in self._requests.values())
        return tally.report(running, len(self._requests) - running, 0.0)
