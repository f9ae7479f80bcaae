"""`InferenceService`: Generate and Tokenize."""

import asyncio
import uuid

from sharp.serving.engine.events import Accepted, Delta, Event, Failed, Finished
from sharp.serving.engine.thread import EngineThread
from sharp.serving.errors import InputError, NotFoundError, SlowReaderError
from sharp.serving.grpc.convert import delta_message, finished_message, prompt_of, sampling_params_of
from sharp.serving.grpc.status import Context, reports_errors
from sharp.serving.model_folder import ModelFolder
from sharp.serving.request import Request, tokenize
from sharp.v1 import inference_pb2, inference_pb2_grpc

MAX_REQUEST_ID = 256


class EventStream:
    """A request in the engine, and its events on their way to the event loop.

    It is bounded: when the client does not read, the request fails instead of filling the memory.
    """

    def __init__(self, request: Request, engine: EngineThread, limit: int) -> None:
        self._request = request
        self._engine = engine
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._overflowed = False

    def start(self) -> None:
        """Give the request to the engine."""
        self._engine.submit(self._request, self._receive)

    def stop(self) -> None:
        """End the request, if it still runs, and free its blocks."""
        self._engine.abort(self._request.request_id, self._receive)

    def _receive(self, event: Event) -> None:
        """Add an event; called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event) -> None:
        if self._overflowed:
            return
        if self._events.qsize() >= self._limit:
            self._overflowed = True
            self.stop()  # now: whoever reads this stream may wait for the client for ever
            error = SlowReaderError(f"the client left {self._limit} messages unread; the request was stopped")
            event = Failed(self._request.request_id, error)
        self._events.put_nowait(event)

    async def get(self) -> Event:
        """The next event."""
        return await self._events.get()


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Gives requests to the engine and streams what comes back."""

    def __init__(self, model: ModelFolder, engine: EngineThread, max_unread_messages: int) -> None:
        self._model = model
        self._engine = engine
        self._max_unread_messages = max_unread_messages

    @reports_errors
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Stream the answer to one prompt."""
        check_model(self._model, request.model)
        # Tokenizing a long text takes a while, and the event loop serves everyone.
        prepared = await asyncio.to_thread(self._prepare, request)
        stream = EventStream(prepared, self._engine, self._max_unread_messages)
        stream.start()
        finished = False
        try:
            while not finished:
                finished = await self._send(await stream.get(), context)
        finally:
            # Also when the client has gone: this task is cancelled then, and the blocks must not stay taken.
            if not finished:
                stream.stop()

    def _prepare(self, request: inference_pb2.GenerateRequest) -> Request:
        if len(request.request_id) > MAX_REQUEST_ID:
            raise InputError(f"request_id has {len(request.request_id)} characters; the limit is {MAX_REQUEST_ID}")
        return self._model.prepare(
            request.request_id or uuid.uuid4().hex,
            prompt_of(request),
            sampling_params_of(request),
            attention=request.response.attention_stats,
        )

    async def _send(self, event: Event, context: Context) -> bool:
        """Send one event; return whether it was the last."""
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Accepted):
            info = inference_pb2.PromptInfo(
                request_id=event.request_id, model=self._model.manifest.name, prompt_tokens=event.prompt_tokens
            )
            await context.write(inference_pb2.GenerateResponse(prompt_info=info))
        elif isinstance(event, Delta):
            await context.write(delta_message(event))
        elif isinstance(event, Finished):
            await context.write(finished_message(event))
            return True
        return False

    @reports_errors
    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, _context: Context
    ) -> inference_pb2.TokenizeResponse:
        """The token ids of a text."""
        check_model(self._model, request.model)
        model = self._model
        token_ids = await asyncio.to_thread(tokenize, request.text, model.manifest, model.tokenizer)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)


def check_model(model: ModelFolder, name: str) -> None:
    """Raise NotFoundError unless `name` is the served model or not set."""
    if name and name != model.manifest.name:
        raise NotFoundError(f"model {name!r} is not served here; the server has {model.manifest.name!r}")
