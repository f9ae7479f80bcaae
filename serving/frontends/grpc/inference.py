"""`InferenceService`: Generate and Tokenize."""

import asyncio

from sharp.serving.api.errors import FieldError
from sharp.serving.api.events import Delta, Finished, PromptComputed
from sharp.serving.api.request import Request, check_characters, tokenize
from sharp.serving.frontends.grpc.convert import (
    PATHS,
    delta_message,
    finished_message,
    prompt_info,
    prompt_of,
    sampling_params_of,
)
from sharp.serving.frontends.rpc.call import call_of
from sharp.serving.frontends.rpc.status import Context, reports_errors, write
from sharp.serving.frontends.service import EventStream, GenerationService, new_request_id
from sharp.v1 import inference_pb2, inference_pb2_grpc

MAX_REQUEST_ID = 256
REQUEST_ID_METADATA = "sharp-request-id"


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Gives requests to the engine and streams what comes back."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    @reports_errors
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Stream the answers to one prompt."""
        async with self._service.stream(call_of(context, "grpc"), lambda: self._prepare(request)) as stream:
            await self._send(stream, context)

    def _prepare(self, request: inference_pb2.GenerateRequest) -> Request:
        self._service.check_model(request.model)
        try:
            return self._checked(request)
        except FieldError as error:
            raise FieldError(PATHS.get(error.field, error.field), str(error)) from error

    def _checked(self, request: inference_pb2.GenerateRequest) -> Request:
        if len(request.request_id) > MAX_REQUEST_ID:
            message = f"request_id has {len(request.request_id)} characters; the limit is {MAX_REQUEST_ID}"
            raise FieldError("request_id", message)
        return self._service.model.prepare(
            request.request_id or new_request_id(),
            prompt_of(request),
            sampling_params_of(request),
            attention=request.response.attention_stats,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    async def _send(self, stream: EventStream, context: Context) -> None:
        await anext(stream)  # accepted, or the error that says why not
        request, model = stream.request, self._service.model.manifest.name
        metadata = list(stream.headers.items())
        if request.request_id.isascii() and request.request_id.isprintable():  # metadata can hold no other
            metadata.append((REQUEST_ID_METADATA, request.request_id))
        await context.send_initial_metadata(metadata)
        informed = False
        async for event in stream:
            if not informed:
                # An answer that ends while it waits has no computed prompt to tell of.
                computed = event if isinstance(event, PromptComputed) else None
                if computed and computed.logprobs:  # those of a whole prompt take a while
                    info = await asyncio.to_thread(prompt_info, request, model, computed)
                else:
                    info = prompt_info(request, model, computed)
                await write(context, info)
                informed = True
            if isinstance(event, Delta):
                await write(context, delta_message(event))
            elif isinstance(event, Finished):
                await write(context, finished_message(event))

    @reports_errors
    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, _context: Context
    ) -> inference_pb2.TokenizeResponse:
        """The token ids of a text."""
        self._service.check_model(request.model)
        model = self._service.model
        check_characters(request.text, model.context_limit)
        token_ids = await asyncio.to_thread(tokenize, request.text, model.manifest, model.tokenizer)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)
