"""`EncoderEngine`: encodes the texts of requests together, one batch at a time."""

import logging
import time

import numpy as np
from numpy.typing import NDArray

from sharp.plugins.manifest import Manifest, Pooling
from sharp.serving.api.attention import AttentionRows
from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.errors import AlreadyExistsError, DeviceLostError, EngineError, SharpError
from sharp.serving.api.events import (
    Accepted,
    EncodedTexts,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptChunk,
    PromptComputed,
    Timing,
    Usage,
)
from sharp.serving.backends.encoder import EncoderBackend, EncoderBatch
from sharp.serving.config import EngineConfig
from sharp.serving.encoder.batching import RunningRequest, WaitingText, choose
from sharp.serving.encoder.pooling import pool
from sharp.serving.engine.queue_limit import QueueLimit
from sharp.serving.engine.report import Ended, EngineReport, Tally, Timed

logger = logging.getLogger(__name__)

# Batches are chosen from so many texts, and so many of each request, in rotation: a request of two thousand texts
# delays one that comes after it by a batch or two.
WINDOW, WINDOW_OF_REQUEST = 512, 64
# Of a processor larger batches are slower: with 384 channels 512 tokens took 0.91 of the time of 2048, as what is
# computed between two products stays in its cache.
CPU_BATCH_TOKENS = 512
NOT_FINITE = "the model gave numbers that are not finite for this request"


class EncoderEngine:
    """Turns texts into rows of numbers: embeddings before they are normalized, or logits of labels.

    Not safe for threads: one owns it. It has the verbs of `Engine`, so that `EngineThread` runs either.
    """

    def __init__(self, backend: EncoderBackend, manifest: Manifest, pooling: Pooling, config: EngineConfig) -> None:
        self._backend = backend
        self._pooling = pooling
        self._windows = np.array(manifest.windows, np.int64) if manifest.windows else None
        self._config = config
        most = config.max_batch_tokens
        self.batch_tokens = min(most, CPU_BATCH_TOKENS) if backend.device == "cpu" else most
        self._queue_limit = QueueLimit(config.max_waiting_requests, config.max_waiting_tokens)
        self._requests: dict[str, RunningRequest] = {}  # the next one first
        self._waiting_tokens = 0
        self._steps = 0
        self.failed_steps = 0  # one after the other
        self._tally = Tally()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._requests)

    def add(self, request: EncodeRequest) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request of that id is still there.
            QueueFullError: too much waits already.
        """
        if request.request_id in self._requests:
            raise AlreadyExistsError(f"request_id {request.request_id!r} belongs to a request that is still running")
        not_started = sum(one.started is None for one in self._requests.values())
        self._queue_limit.check(1, request.prompt_tokens, not_started, self._waiting_tokens)
        running = RunningRequest(request, time.perf_counter())
        texts = [WaitingText(running, index, len(one.token_ids)) for index, one in enumerate(request.tokens)]
        running.waiting = sorted(texts, key=lambda text: text.tokens)
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
        batch = choose(self._window(), self.batch_tokens, self._config.max_sequences)
        self._begin(batch, began)
        interval = self._config.attention_interval
        collect = interval > 0 and self._steps % interval == 0
        self._steps += 1
        try:
            arrays = pack(batch, collect_stats=collect)
            output = self._backend.run(arrays)
            rows = pool(output.values, [text.tokens for text in batch], self._pooling)
        except DeviceLostError:
            raise
        except Exception as error:  # whatever a runtime raises must not end the engine
            logger.exception("a batch of %d texts failed", len(batch))
            self.failed_steps += 1
            return self._fail_all(batch, EngineError(f"a batch of the encoder failed: {error}"))
        now = time.perf_counter()
        self._count(batch, arrays, now - began)
        if output.stats is not None:
            self._tally.attention.append(attention_rows(output.stats, arrays.attention_mask, self._windows))
        return self._take(batch, rows, began, now)

    def _window(self) -> list[WaitingText]:
        """The texts from which the next batch is chosen; the first of them must be in it."""
        window: list[WaitingText] = []
        for running in self._requests.values():
            window += running.waiting[:WINDOW_OF_REQUEST]
            if len(window) >= WINDOW:
                break
        return window

    def _begin(self, batch: list[WaitingText], now: float) -> None:
        """Take a batch out of what waits; the request whose turn it was is the last one now."""
        first = next(iter(self._requests))
        self._requests[first] = self._requests.pop(first)
        self._waiting_tokens -= sum(text.tokens for text in batch)
        chosen = set(batch)
        for running in {text.request.request.request_id: text.request for text in batch}.values():
            running.waiting = [text for text in running.waiting if text not in chosen]
            if running.started is None:
                running.started = now
                self._queue_limit.admitted(running.request.prompt_tokens, now)
                self._tally.queue.append(Timed(now - running.arrived, running.request.request_id))

    def _count(self, batch: list[WaitingText], arrays: EncoderBatch, seconds: float) -> None:
        tokens = sum(text.tokens for text in batch)
        self._tally.prompt_tokens += tokens
        self._tally.padding_tokens += arrays.input_ids.size - tokens
        self._tally.batch_texts.append(len(batch))
        self._tally.step_seconds.append(seconds)

    def _take(self, batch: list[WaitingText], rows: NDArray[np.float32], began: float, now: float) -> list[Event]:
        """Give the rows of a batch to their requests, and end those that have all."""
        finite: NDArray[np.bool_] = np.asarray(np.isfinite(rows).all(axis=1))
        self.failed_steps = 0 if finite.any() else self.failed_steps + 1
        events = self._fail_all(
            [text for text, is_finite in zip(batch, finite, strict=True) if not is_finite], EngineError(NOT_FINITE)
        )
        tokens: dict[str, int] = {}
        for text, row in zip(batch, rows, strict=True):
            text.request.rows[text.index] = row
            request_id = text.request.request.request_id
            tokens[request_id] = tokens.get(request_id, 0) + text.tokens
        for request_id, count in tokens.items():
            running = self._requests.get(request_id)
            if running is None:  # it has failed
                continue
            running.chunks.append(PromptChunk(count, began, now))
            if len(running.rows) == len(running.request.tokens):
                self._forget(request_id)
                values = np.stack([running.rows[index] for index in range(len(running.rows))])
                events.append(PromptComputed(request_id, 0, tuple(running.chunks)))
                events.append(EncodedTexts(request_id, values))
                events.append(self._finished(running, FinishReason.STOP))
        return events

    def _fail_all(self, batch: list[WaitingText], error: SharpError) -> list[Event]:
        events: list[Event] = []
        for request_id in dict.fromkeys(text.request.request.request_id for text in batch):
            running = self._forget(request_id)
            if running is not None:
                self._tally.finished.append(Ended("error", time.perf_counter() - running.arrived, request_id))
                events.append(Failed(request_id, error))
        return events

    def _forget(self, request_id: str) -> RunningRequest | None:
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._waiting_tokens -= sum(text.tokens for text in running.waiting)
        return running

    def _finished(self, running: RunningRequest, reason: FinishReason) -> Finished:
        total = time.perf_counter() - running.arrived
        queue = None if running.started is None else running.started - running.arrived
        request = running.request
        self._tally.finished.append(Ended(str(reason), total, request.request_id))
        return Finished(
            request.request_id, reason, None, Usage(request.prompt_tokens, 0), Timing(queue, None, total), None
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless what waits and the requests agree."""
        waiting = sum(text.tokens for running in self._requests.values() for text in running.waiting)
        if waiting != self._waiting_tokens:
            raise RuntimeError(f"{waiting} tokens wait in the encoder's engine, which counts {self._waiting_tokens}")

    def report(self) -> EngineReport:
        """What happened since the last report."""
        tally, self._tally = self._tally, Tally()
        running = sum(one.started is not None for one in self._requests.values())
        return tally.report(running, len(self._requests) - running, 0.0)


def pack(texts: list[WaitingText], *, collect_stats: bool) -> EncoderBatch:
    """The arrays of a batch, with padding behind every text."""
    shape = len(texts), max(text.tokens for text in texts)
    arrays = [np.zeros(shape, np.int64) for _ in range(3)]
    for row, text in enumerate(texts):
        tokens = text.request.request.tokens[text.index]
        for array, values in zip(arrays, (tokens.token_ids, 1, tokens.token_types or 0), strict=True):
            array[row, : text.tokens] = values
    input_ids, mask, token_types = arrays
    return EncoderBatch(input_ids, mask, token_types, collect_stats)


def attention_rows(
    stats: NDArray[np.float32], mask: NDArray[np.int64], windows: NDArray[np.int64] | None
) -> AttentionRows:
    """Statistics [layers, batch, q_heads, length, 4] without those of padding; a token sees all of its text."""
    counts = mask.astype(bool)
    lengths = np.broadcast_to(mask.sum(1, keepdims=True), mask.shape)[counts]
    return AttentionRows(stats.swapaxes(2, 3)[:, counts], lengths - 1, windows)
