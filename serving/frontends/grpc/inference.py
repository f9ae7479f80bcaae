"""`InferenceService`: Generate and Tokenize."""

import asyncio

from sharp.serving.api.errors import FieldError
from sharp.serving.api.events import Delta, Finished, PromptComputed
from sharp.serving.api.request import GenerateRequest
from sharp.serving.frontends.grpc.convert import (
    PATHS,
    delta_message,
    finished_message,
    generate_request,
    prompt_info,
)
from sharp.serving.frontends.grpc.status import Context, origin_of, reports_errors, write
from sharp.serving.frontends.service import EventStream, GenerationService
from sharp.serving.text.tokenizer import check_characters, tokenize
from sharp.v1 import inference_pb2, inference_pb2_grpc

REQUEST_ID_METADATA = "sharp-request-id"


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """RPCs that give requests to the engine and stream its events."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    @reports_errors
    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Stream the completions of one prompt."""
        async with self._service.stream(origin_of(context, "grpc"), lambda: self._prepare(request)) as stream:
            await self._send(stream, context)

    def _prepare(self, message: inference_pb2.GenerateRequest) -> GenerateRequest:
        """Check a request message and return the engine's request.

        FieldError names the field by its path in the message.
        """
        self._service.check_model(message.model)
        try:
            return self._service.model.abilities.require_generator().prepare(generate_request(message))
        except FieldError as error:
            raise FieldError(PATHS.get(error.field, error.field), str(error)) from error

    async def _send(self, stream: EventStream[GenerateRequest], context: Context) -> None:
        """Send a request's events to the client: metadata, prompt information, then the outputs."""
        request, model = stream.request, self._service.model.manifest.name
        metadata = list(stream.headers.items())
        if request.request_id.isascii() and request.request_id.isprintable():  # metadata can hold no other id
            metadata.append((REQUEST_ID_METADATA, request.request_id))
        await context.send_initial_metadata(metadata)
        informed = False
        async for event in stream:
            if not informed:
                # A sequence that ends while it waits has no computed prompt.
                computed = event if isinstance(event, PromptComputed) else None
                if computed and computed.logprobs:  # the logprobs of a whole prompt take a while to convert
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
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Return the token ids of a text."""
        self._service.check_model(request.model)
        model = self._service.model
        check_characters(request.text, model.context_limit)

        def respond() -> inference_pb2.TokenizeResponse:
            """Return the token ids of the text; runs in a thread."""
            return inference_pb2.TokenizeResponse(token_ids=tokenize(request.text, model.manifest, model.tokenizer))

        return await self._service.parsing.run(respond, origin_of(context, "grpc").client)
