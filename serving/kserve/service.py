"""`GRPCInferenceService`: Triton's clients, unchanged."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from sharp.kserve import grpc_service_pb2 as messages
from sharp.kserve import grpc_service_pb2_grpc
from sharp.serving.completion import Answers
from sharp.serving.engine.events import Delta, Finished
from sharp.serving.errors import SERVER_FAILED, FieldError, NotFoundError, SharpError
from sharp.serving.grpc.call import call_of
from sharp.serving.grpc.status import Context, reports_errors
from sharp.serving.kserve.tensors import (
    EXCLUDE_INPUT,
    INPUT_TYPES,
    SAMPLING_PARAMETERS,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
    read_inputs,
    text_response,
)
from sharp.serving.request import Request
from sharp.serving.request_log import refusals_logged
from sharp.serving.sampling_fields import SamplingFields, first_error
from sharp.serving.served import Call
from sharp.serving.service import GenerationService, new_request_id

logger = logging.getLogger(__name__)
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

VERSION = "1"
# Requests of one ModelStreamInfer call that run together; the next is read when one of them is complete.
MAX_TOGETHER = 64
FINAL = "triton_final_response"
TIMEOUT = "timeout"  # of the clients' infer, in microseconds
EMPTY_FINAL = "triton_enable_empty_final_response"  # a wish that is always fulfilled


@dataclass(frozen=True)
class _Wish:
    """What a request asks for."""

    text: str
    fields: SamplingFields
    stream: bool
    with_input: bool


class KServeService(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Gives requests to the engine and answers in tensors."""

    def __init__(self, service: GenerationService, version: str) -> None:
        self._service = service
        self._version = version
        self._model = service.model.manifest.name

    @reports_errors
    async def ServerLive(  # noqa: N802
        self, _request: messages.ServerLiveRequest, _context: Context
    ) -> messages.ServerLiveResponse:
        """The server runs."""
        return messages.ServerLiveResponse(live=True)

    @reports_errors
    async def ServerReady(  # noqa: N802
        self, _request: messages.ServerReadyRequest, _context: Context
    ) -> messages.ServerReadyResponse:
        """The server takes requests."""
        return messages.ServerReadyResponse(ready=self._service.serving)

    @reports_errors
    async def ModelReady(  # noqa: N802
        self, request: messages.ModelReadyRequest, _context: Context
    ) -> messages.ModelReadyResponse:
        """The model takes requests."""
        self._check_model(request.name, request.version)
        return messages.ModelReadyResponse(ready=self._service.serving)

    @reports_errors
    async def ServerMetadata(  # noqa: N802
        self, _request: messages.ServerMetadataRequest, _context: Context
    ) -> messages.ServerMetadataResponse:
        """What the server is."""
        return messages.ServerMetadataResponse(name="sharp", version=self._version)

    @reports_errors
    async def ModelMetadata(  # noqa: N802
        self, request: messages.ModelMetadataRequest, _context: Context
    ) -> messages.ModelMetadataResponse:
        """The tensors of the model."""
        self._check_model(request.name, request.version)
        tensor = messages.ModelMetadataResponse.TensorMetadata
        return messages.ModelMetadataResponse(
            name=self._model,
            versions=[VERSION],
            platform="sharp",
            inputs=[tensor(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUT_TYPES.items()],
            outputs=[tensor(name=TEXT_OUTPUT, datatype="BYTES", shape=[1])],
        )

    @reports_errors
    async def ModelInfer(  # noqa: N802
        self, request: messages.ModelInferRequest, context: Context
    ) -> messages.ModelInferResponse:
        """Generate, and answer with the whole text."""
        call = call_of(context, "kserve")
        with refusals_logged(call, self._model):
            wish = self._wish(request)
            if wish.stream:
                raise FieldError(STREAM, "stream is true; only ModelStreamInfer can answer in parts")
        return await self._whole(request, wish, call)

    @reports_errors
    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[messages.ModelInferRequest], context: Context
    ) -> None:
        """Generate for each request of the stream; an error is that of its request and ends no other."""
        await answer_together(
            requests, lambda request: self._answered(request, call_of(context, "kserve")), context.write
        )

    async def _answered(
        self, request: messages.ModelInferRequest, call: Call
    ) -> AsyncGenerator[messages.ModelStreamInferResponse, None]:
        """What a stream has for a request, its error included."""
        try:
            async with aclosing(self._responses(request, call)) as responses:
                async for response in responses:
                    yield messages.ModelStreamInferResponse(infer_response=response)
        except Exception as error:
            if not isinstance(error, SharpError):
                logger.exception("a request of ModelStreamInfer failed")
            yield stream_error(request, str(error) if isinstance(error, SharpError) else SERVER_FAILED, self._model)

    async def _responses(
        self, request: messages.ModelInferRequest, call: Call
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        with refusals_logged(call, self._model):
            wish = self._wish(request)
        if not wish.stream:
            whole = await self._whole(request, wish, call)
            whole.parameters[FINAL].bool_param = True
            yield whole
            return
        async with self._service.stream(call, lambda: self._prepare(wish)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    yield text_response(self._model, request.id, event.text)
                elif isinstance(event, Finished):
                    last = text_response(self._model, request.id, "")
                    last.parameters[FINAL].bool_param = True
                    last.parameters["finish_reason"].string_param = str(event.reason)
                    yield last

    async def _whole(self, request: messages.ModelInferRequest, wish: _Wish, call: Call) -> messages.ModelInferResponse:
        async with self._service.stream(call, lambda: self._prepare(wish)) as events:
            answers = Answers(events.request.params)
            async for event in events:
                answers.take(event)
        completion = answers.completion()
        text = (wish.text if wish.with_input else "") + completion.text
        response = text_response(self._model, request.id, text)
        response.parameters["finish_reason"].string_param = str(completion.finish_reason)
        return response

    def _prepare(self, wish: _Wish) -> Request:
        return self._service.model.prepare(
            new_request_id(),  # the client's is its own affair: it may have several of one name
            wish.text,
            wish.fields.params(),
            priority=wish.fields.priority,
            cache_salt=wish.fields.cache_salt,
        )

    def _wish(self, request: messages.ModelInferRequest) -> _Wish:
        self._check_model(request.model_name, request.model_version)
        for output in request.outputs:
            if output.name != TEXT_OUTPUT:
                raise FieldError(output.name, f"output {output.name!r} is not known; the output is {TEXT_OUTPUT}")
        inputs = read_inputs(request)
        if TEXT_INPUT not in inputs:
            raise FieldError(TEXT_INPUT, f"input {TEXT_INPUT!r} is missing")
        parameters = {
            name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
            for name, value in request.parameters.items()
            if name != EMPTY_FINAL
        }
        if (microseconds := parameters.pop(TIMEOUT, 0)) and isinstance(microseconds, int):
            parameters["time_limit_ms"] = -(-microseconds // 1000)
        try:
            given = json.loads(str(inputs.get(SAMPLING_PARAMETERS) or "{}"))
            fields = SamplingFields.model_validate({**given, **parameters})
        except ValidationError as error:
            raise first_error(error) from error
        except (ValueError, TypeError, RecursionError) as error:
            message = f"input {SAMPLING_PARAMETERS!r} must be a JSON object: {error}"
            raise FieldError(SAMPLING_PARAMETERS, message) from error
        if fields.n not in (None, 1):
            raise FieldError("n", f"n is {fields.n}; {TEXT_OUTPUT} holds one answer, ask several times")
        stream = bool(inputs.get(STREAM))
        with_input = not inputs.get(EXCLUDE_INPUT, stream)  # by default as in Triton's vLLM backend
        if stream and with_input:
            raise FieldError(EXCLUDE_INPUT, f"{EXCLUDE_INPUT} is false; a stream has new text only")
        return _Wish(str(inputs[TEXT_INPUT]), fields, stream, with_input)

    def _check_model(self, name: str, version: str) -> None:
        self._service.check_model(name)
        if version not in ("", VERSION):
            raise NotFoundError(f"model {name!r} has no version {version!r}; it has version {VERSION!r}")


async def answer_together(
    requests: AsyncIterator[Asked],
    answers: Callable[[Asked], AsyncGenerator[Answer]],
    write: Callable[[Answer], Awaitable[None]],
) -> None:
    """Write what there is for each request of a stream as it comes; a client that goes cancels all of it."""
    room = asyncio.Semaphore(MAX_TOGETHER)
    writing = asyncio.Lock()

    async def answer(request: Asked) -> None:
        try:
            async with aclosing(answers(request)) as responses:
                async for response in responses:
                    async with writing:  # one message at a time
                        await write(response)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        async for request in requests:
            await room.acquire()
            group.create_task(answer(request))


def stream_error(request: messages.ModelInferRequest, message: str, model: str) -> messages.ModelStreamInferResponse:
    """The answer of a stream to a request that failed."""
    failed = messages.ModelInferResponse(model_name=model, id=request.id)
    return messages.ModelStreamInferResponse(error_message=message, infer_response=failed)
