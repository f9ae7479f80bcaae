"""The endpoints that generate: `/v1/completions` and `/v1/chat/completions`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from sharp.serving.api.errors import FieldError, SharpError, UnavailableError
from sharp.serving.api.request import GenerateRequest, Prompt, new_request_id
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.buffers import Held
from sharp.serving.frontends.http.body import read_body
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.logprobs import LogprobLimit
from sharp.serving.frontends.http.openai_request import ChatRequest, CompletionRequest, GenerationRequest
from sharp.serving.frontends.http.openai_response import (
    ChatResponse,
    CompletionResponse,
    Extras,
    ResponseBuilder,
)
from sharp.serving.frontends.http.sending import completions, send_stream, send_whole, until_disconnected
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.http.unknown_fields import UnknownFields
from sharp.serving.frontends.service import EventStream, GenerationService
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import Call
from sharp.serving.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class Endpoint:
    """What all routes of a model need."""

    service: GenerationService
    template: ChatTemplate | None
    texts: TokenTexts
    fields: UnknownFields
    max_body_bytes: int


class Generation:
    """An ASGI application for one of the two endpoints.

    All of a request happens inside one call, so that whatever ends it, also a client that goes, ends what it runs.
    """

    def __init__(self, endpoint: Endpoint, kind: type[GenerationRequest]) -> None:
        self._service = endpoint.service
        self._endpoint = endpoint
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        call = Call("http", dict(Request(scope).headers))
        try:
            with self._service.buffers.hold() as held:
                with refusals_logged(call, self._service.model.manifest.name):
                    await read_body(Request(scope, receive), self._endpoint.max_body_bytes, held)
                await until_disconnected(receive, self._respond(held, call, scope, receive, send))
        except ClientDisconnect:
            return
        except SharpError as error:
            await error_response(error)(scope, receive, send)

    async def _respond(self, held: Held, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        with refusals_logged(call, self._service.model.manifest.name):
            request, params, prompts = await self._service.parsing.run(lambda: self._read(held.take()))
        if params.logprobs is not None:
            await asyncio.to_thread(self._endpoint.texts.load)
        request_id = request.request_id or new_request_id()
        # The client's own need not be unique, and the engine's must be.
        own = f"{request_id}-{new_request_id()[:8]}" if request.request_id else request_id
        limit = LogprobLimit(whole=not request.stream)
        prepare = [
            self._preparation(request, f"{own}-{number}", prompt, params, limit)
            for number, prompt in enumerate(prompts)
        ]
        async with self._service.streams(call, prepare) as streams:
            response = self._response(request, request_id, prompts, streams)
            if request.stream:
                await send_stream(request, params, response, streams, send)
                return
            try:
                complete = await completions(streams)
            except UnavailableError as error:  # caught here: to the log it is cancelled, not failed
                await error_response(error)(scope, receive, send)
            else:
                await send_whole(response, complete, streams[0].headers, send)

    def _response(
        self, request: GenerationRequest, request_id: str, prompts: list[Prompt], streams: list[EventStream]
    ) -> ResponseBuilder:
        name, tokenizer = self._service.model.manifest.name, self._service.model.tokenizer
        texts = self._endpoint.texts.named_by_ids() if request.return_tokens_as_token_ids else self._endpoint.texts
        extras = Extras(
            token_ids=request.return_token_ids or tokenizer is None,  # without one the text is empty
            prompts=[stream.request.prompt_ids for stream in streams] if request.return_token_ids else (),
            usage=request.stream and request.counts_stream,
        )
        if isinstance(request, ChatRequest):
            several = request.parallel_tool_calls
            return ChatResponse(request_id, name, texts, extras, tools=bool(request.callable), several=several)
        echo = []
        if isinstance(request, CompletionRequest) and request.echo and tokenizer is not None:
            for prompt, stream in zip(prompts, streams, strict=True):
                text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
                echo.append((text, stream.request.prompt_ids[0]))
        return CompletionResponse(request_id, name, texts, extras, echo)

    def _read(self, body: bytes) -> tuple[GenerationRequest, SamplingParams, list[Prompt]]:
        request = self._endpoint.fields.parse(self._kind, body)
        self._endpoint.fields.note(request.without_effect, "has no effect here")
        self._service.check_model(request.model)
        try:
            params = request.params()
        except FieldError as error:
            raise request.renamed(error) from error
        return request, params, self._prompts(request)

    def _prompts(self, request: GenerationRequest) -> list[Prompt]:
        if isinstance(request, CompletionRequest):
            return list(request.prompts(self._service.model.tokenizer))
        if not isinstance(request, ChatRequest):
            raise TypeError(f"{type(request).__name__} has no prompt")
        return [request.rendered(self._endpoint.template)]

    def _preparation(
        self, request: GenerationRequest, request_id: str, prompt: Prompt, params: SamplingParams, limit: LogprobLimit
    ) -> Callable[[], GenerateRequest]:
        def prepare() -> GenerateRequest:
            try:
                generate = GenerateRequest(
                    prompt,
                    params,
                    request_id=request_id,
                    attention=request.attention_stats,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    special_tokens=request.adds_special_tokens,
                    truncate_prompt_tokens=request.truncate_prompt_tokens,
                    truncate_right=request.truncation_side == "right",
                )
                return limit.add(self._service.model.prepare(generate))
            except FieldError as error:
                raise request.renamed(error) from error

        return prepare
