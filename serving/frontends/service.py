"""`GenerationService`: what every API frontend does with a request, whatever the protocol."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.errors import (
    DrainingError,
    EngineError,
    NotFoundError,
    SlowReaderError,
    StalledError,
    UnavailableError,
)
from sharp.serving.api.events import Event, Failed, Finished
from sharp.serving.api.request import GenerateRequest, Request
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.config import ServerConfig
from sharp.serving.engine.mapped_files import MappedFiles
from sharp.serving.engine.report import EngineReport
from sharp.serving.engine.served_model import ServedModel
from sharp.serving.engine.thread import EngineThread
from sharp.serving.frontends.admission import Buffers, Pool, most_request_bytes, release_held
from sharp.serving.frontends.health import Health
from sharp.serving.frontends.unknown_fields import UnknownFields
from sharp.serving.observability.request_log import log_prompt, log_request
from sharp.serving.observability.request_record import RequestOrigin, RequestRecord
from sharp.serving.observability.tracing import Tracing

# A client that reads nothing for this long has gone, whatever its connection says, so its call is ended.
UNREAD_SECONDS = 60.0
# Parsing and rendering hold the interpreter's lock, so more threads would only slow down the engine's thread. Preparing
# a request is mostly waiting for a schema or grammar that is compiled elsewhere.
PARSING_THREADS, PREPARING_THREADS = 2, 64
MOST_WAITING = 256
R = TypeVar("R", bound=Request)
DRAINING = "the server ends and takes no more requests; ask another one"


class EventStream(Generic[R]):
    """A request in the engine, and its events on their way to the event loop.

    The queue of events is bounded. When the client does not read, the request fails instead of filling the memory.
    """

    def __init__(
        self,
        request: R,
        engine: EngineThread,
        limit: int,
        record: RequestRecord,
        headers: Mapping[str, str],
    ) -> None:
        """Take a request and the `headers` of its response, which hold the trace context of the request.

        The request fails when `limit` messages are unread.
        """
        self.request = request
        self.headers = headers
        self._record = record
        self._engine = engine
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._overflowed = False
        self._ended = False

    def start(self) -> None:
        """Give the request to the engine. Call once, before anything else."""
        self._engine.submit(self.request, self._receive)

    def stop(self) -> None:
        """End the request, if it still runs, and free its blocks."""
        if not self._ended:
            self._engine.abort(self.request.request_id, self._receive)

    def _receive(self, event: Event) -> None:
        """Pass an event to the event loop; called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, event, time.perf_counter())

    def _put(self, event: Event, now: float) -> None:
        """Queue an event of time `now` for the reader.

        If the reader is too slow, stop the request and queue its failure.
        """
        self._record.take(event, now)
        if self._overflowed:
            return
        if self._events.qsize() >= self._limit:
            self._overflowed = True
            self.stop()  # at once, because the reader of this stream may wait for its client forever
            error = SlowReaderError(f"the client left {self._limit} messages unread; the request was stopped")
            event = Failed(self.request.request_id, error)
            self._record.take(event, now)
        self._events.put_nowait(event)

    async def accepted(self) -> None:
        """Wait until the engine has queued the request. Call once, after `start` and before the events are read.

        Raises:
            SharpError: the engine refused the request.
        """
        await anext(self)  # Accepted, or Failed

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """Return the next event. Finished of the last sequence ends the stream.

        Raises:
            SharpError: the error of Failed, or SlowReaderError if too many events were left unread.
        """
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        self._ended = isinstance(event, Failed) or (isinstance(event, Finished) and event.last)
        if isinstance(event, Failed):
            raise event.error
        return event


class GenerationService:
    """The service that takes requests for one model and streams the engine's events; lives in one event loop."""

    def __init__(
        self,
        model: ServedModel,
        engine: EngineThread,
        max_unread_messages: int,
        stall_seconds: float,
        tracing: Tracing | None = None,
        log_prompts: bool = False,
        max_buffered_bytes: int = ServerConfig.max_buffered_bytes,
    ) -> None:
        self.model = model
        self._tracing = tracing
        self._log_prompts = log_prompts
        self.engine = engine
        self._stall_seconds = stall_seconds
        self.draining = False
        self._time_is_over = False  # for the requests that ran when draining began
        self.load: EngineReport | None = None
        self._max_unread_messages = max_unread_messages
        self.health = Health(self, stall_seconds)
        largest = most_request_bytes(model, ServerConfig.max_message_bytes)
        self.buffers = Buffers(max(max_buffered_bytes, largest))  # so that a single request always fits
        self.parsing = Pool("parsed", PARSING_THREADS, MOST_WAITING)
        self.preparing = Pool("prepared", PREPARING_THREADS, MOST_WAITING)
        self._open = 0
        self.isolate_tokens = True
        self.mapped: MappedFiles | None = None
        self.names: tuple[str, ...] = (model.manifest.name,)
        self.chat_template: str | None = None
        self.fields = UnknownFields("warn")
        self._streams: set[EventStream[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def observe(self, report: EngineReport) -> None:
        """Take a report of the engine, in the engine's thread."""
        self.load = report

    def check_serving(self) -> None:
        """Check that the engine can run a request now. Health checks and every new request call this.

        Raises:
            DrainingError: the server takes no more requests.
            UnavailableError: the files of the weights have changed while they were served.
            SharpError: from `check_engine`.
        """
        if self.draining:
            raise DrainingError(DRAINING)
        if self.mapped is not None and self.mapped.problem is not None:
            raise UnavailableError(self.mapped.problem, UNREAD_SECONDS)
        self.check_engine()

    def check_engine(self) -> None:
        """Check that the engine works.

        Raises:
            EngineError: the engine has ended.
            StalledError: the engine is stuck in a step.
        """
        if self.engine.ended.done():
            raise EngineError("the engine has ended; the server's log says why")
        if self.engine.seconds_in_step > self._stall_seconds:
            raise StalledError(
                f"the engine has been in one step for over {self._stall_seconds:g} s; ask another server"
            )

    @property
    def open_requests(self) -> int:
        """The number of requests that run or wait."""
        return self._open

    def check_model(self, name: str) -> None:
        """Raise NotFoundError unless `name` is empty or a name of the served model."""
        if name and name not in self.names:
            served = " or ".join(map(repr, self.names))
            raise NotFoundError(f"model {name!r} is not served here; the server has {served}")

    @asynccontextmanager
    async def stream(self, origin: RequestOrigin, prepare: Callable[[], R]) -> AsyncIterator[EventStream[R]]:
        """Run the one request that `prepare` makes, as `streams` does, and yield its stream."""
        async with self.streams(origin, [prepare]) as (stream,):
            yield stream

    @asynccontextmanager
    async def streams(
        self, origin: RequestOrigin, prepare: Sequence[Callable[[], R]]
    ) -> AsyncIterator[list[EventStream[R]]]:
        """Run the requests that the functions make, and yield their streams once the engine has accepted all.

        The functions run in threads of the pool `preparing`. However the block is left, the requests end and their
        cache blocks are free. Each request is logged and traced.

        Raises:
            SharpError: from `check_serving` or one of the functions, too many functions wait, or the engine refuses a
                request.
        """
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(self._submitted(origin, prepared)) for prepared in prepare]
            for stream in streams:
                await stream.accepted()
            release_held()
            yield streams

    @asynccontextmanager
    async def _submitted(self, origin: RequestOrigin, prepare: Callable[[], R]) -> AsyncIterator[EventStream[R]]:
        """Give a request to the engine and yield its stream; log and trace the request when it ends.

        `prepare` makes the engine's request; it runs in a thread.
        """
        record = RequestRecord(origin)
        span = None if self._tracing is None else self._tracing.start(origin, record.arrived)
        try:
            async with self._run(record, prepare, {} if span is None else span.headers) as stream:
                yield stream
        except Exception as error:
            record.error = str(error) or type(error).__name__
            raise
        finally:
            record.ended = time.perf_counter()
            name = self.model.manifest.name
            log_request(record, name, None if span is None else span.trace_id)
            if self._log_prompts:
                log_prompt(record, self.model.tokenizer)
            if span is not None:
                span.end(record, name)

    @asynccontextmanager
    async def _run(
        self, record: RequestRecord, prepare: Callable[[], R], headers: Mapping[str, str]
    ) -> AsyncIterator[EventStream[R]]:
        """Prepare a request and yield its stream of events; end the request when the context is left.

        `prepare` runs in a thread. `headers` are those that the response should have.
        """
        self.check_serving()
        self._open += 1
        self._idle.clear()
        try:
            # Tokenizing a long text takes a while and would block the event loop.
            request = record.request = self._of_caller(
                await self.preparing.run(prepare, record.origin.client), record.origin
            )
            if self._time_is_over:
                raise DrainingError(DRAINING)
            stream = EventStream(request, self.engine, self._max_unread_messages, record, headers)
            self._streams.add(stream)
            record.submitted = time.perf_counter()
            stream.start()
            try:
                yield stream
            finally:
                self._streams.discard(stream)
                # When the client has gone this task is cancelled; the cache blocks must be freed then, too.
                stream.stop()
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _of_caller(self, request: R, origin: RequestOrigin) -> R:
        """Return the request with the name of its client, whose share it uses and whose cached blocks it may reuse."""
        if isinstance(request, EncodeRequest | TensorRequest):
            return replace(request, client=origin.client)
        if not isinstance(request, GenerateRequest):
            return request
        isolation = origin.token if self.isolate_tokens else ""
        return replace(request, client=origin.client, isolation=isolation)

    def close(self) -> None:
        """End the threads of both pools."""
        self.parsing.close()
        self.preparing.close()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait until the running ones are complete, for at most `seconds`.

        Requests that take longer are cancelled. The method returns without waiting for their end.
        """
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self._time_is_over = True
            if self.model.abilities.generator is not None:
                self.model.abilities.generator.guides.end()
            for stream in self._streams:
                stream.stop()  # the client gets the tokens so far, and that its request was cancelled
