"""The endpoints that generate, such as `/v1/completions` and `/v1/chat/completions`."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sharp.serving.api.errors import FieldError, SharpError, UnavailableError
from sharp.serving.api.request import GenerateRequest, Prompt
from sharp.serving.api.sampling_fields import first_error
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.http.body import read_body
from sharp.serving.frontends.http.chat_request import ConvertedRequest
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.openai_request import GenerationRequest
from sharp.serving.frontends.http.request_ids import request_id_of
from sharp.serving.frontends.http.response_limit import ResponseLimit
from sharp.serving.frontends.http.sending import completions, send_stream, send_whole, until_disconnected
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin


class Generation:
    """An ASGI application for one of the endpoints.

    All of a request happens inside one call, so that whatever ends it, also a client that goes, ends what it runs.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        kind: type[GenerationRequest] | type[ConvertedRequest],
        refusal: Callable[[SharpError], Response] = error_response,
    ) -> None:
        """`refusal` is the response of a request that fails before its own has begun."""
        self._refusal = refusal
        self._service = endpoint.service
        self._endpoint = endpoint
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        origin = RequestOrigin("http", dict(Request(scope).headers))
        try:
            with self._service.buffers.hold() as held:
                with refusals_logged(origin, self._service.model.manifest.name):
                    await read_body(Request(scope, receive), self._endpoint.max_body_bytes, held)
                await until_disconnected(receive, self._respond(held, origin, scope, receive, send))
        except ClientDisconnect:
            return
        except SharpError as error:
            await self._refusal(error)(scope, receive, send)

    async def _respond(self, held: Held, origin: RequestOrigin, scope: Scope, receive: Receive, send: Send) -> None:
        with refusals_logged(origin, self._service.model.manifest.name):
            request, params, prompts = await self._service.parsing.run(lambda: self._read(held.take()))
        if params.logprobs is not None:
            await asyncio.to_thread(self._endpoint.texts.load)
        request_id, own = request_id_of(scope, request.request_id)
        limit = ResponseLimit(whole=not request.stream, prompts=len(prompts), repeated_by=request.prompts_repeated_by)
        prepare = [
            self._preparation(request, f"{own}-{number}", prompt, params, limit)
            for number, prompt in enumerate(prompts)
        ]
        async with self._service.streams(origin, prepare) as streams:
            computed = [stream.request.prompt_ids for stream in streams]
            response = request.response(self._endpoint, request_id, prompts, computed)
            if request.stream:
                await send_stream(request, params, response, streams, send)
                return
            try:
                complete = await completions(streams)
            except UnavailableError as error:  # caught here: to the log it is cancelled, not failed
                await self._refusal(error)(scope, receive, send)
            else:
                await send_whole(response, complete, streams[0].headers, send)

    def _read(self, body: bytes) -> tuple[GenerationRequest, SamplingParams, list[Prompt]]:
        parsed = self._endpoint.fields.parse(self._kind, body)
        try:
            request = parsed if isinstance(parsed, GenerationRequest) else parsed.generation()
        except ValidationError as error:  # of what it holds as another API has it
            raise first_error(error) from error
        self._endpoint.fields.note(request.without_effect, "has no effect here")
        self._service.check_model(request.model)
        request.written_in(self._endpoint.forms)
        try:
            params, prompts = request.params(), list(request.prompts(self._endpoint))
        except FieldError as error:
            raise request.renamed(error) from error
        if request.shows_special_tokens and request.skip_special_tokens is None:
            params = replace(params, skip_special_tokens=False)
        return request, params, prompts

    def _preparation(
        self, request: GenerationRequest, request_id: str, prompt: Prompt, params: SamplingParams, limit: ResponseLimit
    ) -> Callable[[], GenerateRequest]:
        def prepare() -> GenerateRequest:
            try:
                generate = GenerateRequest(
                    prompt,
                    params,
                    request_id=request_id,
                    attention=bool(request.attention_stats),
                    attention_per_token=request.attention_stats == "tokens",
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
