"""The endpoints that generate, such as `/v1/completions` and `/v1/chat/completions`."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from sharp.serving.api.errors import FieldError, SharpError, UnavailableError
from sharp.serving.api.request import GenerateRequest, Prompt
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.admission import Held
from sharp.serving.frontends.http.chat_request import TextRequest
from sharp.serving.frontends.http.endpoint import Endpoint
from sharp.serving.frontends.http.errors import error_response
from sharp.serving.frontends.http.messages_request import MessagesRequest
from sharp.serving.frontends.http.openai_request import GenerationRequest
from sharp.serving.frontends.http.request_application import RequestApplication
from sharp.serving.frontends.http.request_ids import request_id_of
from sharp.serving.frontends.http.response_limit import ResponseLimit
from sharp.serving.frontends.http.responses_request import ResponsesRequest
from sharp.serving.frontends.http.sending import completions, send_stream, send_whole
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import RequestOrigin


class Generation(RequestApplication):
    """The ASGI application of one path that generates text, such as `/v1/chat/completions`."""

    def __init__(
        self,
        endpoint: Endpoint,
        kind: type[TextRequest | ResponsesRequest | MessagesRequest],
        refusal: Callable[[SharpError, Scope], Response] = error_response,
    ) -> None:
        """Parse bodies as `kind`; `refusal` makes the response of a request that fails before its own has begun."""
        super().__init__(endpoint, refusal)
        self._kind = kind

    async def _respond(self, request: Request, held: Held, origin: RequestOrigin, send: Send) -> None:
        """Read the request, run all of its prompts and send the response, streamed or whole. `held` has the body."""
        with refusals_logged(origin, self._endpoint.name):
            body, params, prompts = await self._service.parsing.run(lambda: self._read(held.take()), origin.client)
        if params.logprobs is not None:
            await asyncio.to_thread(self._endpoint.texts.load)
        request_id, own = request_id_of(request.scope, body.request_id)
        limit = ResponseLimit(whole=not body.stream, prompts=len(prompts), repeated_by=body.prompts_repeated_by)
        prepare = [
            self._preparation(body, f"{own}-{number}", prompt, params, limit) for number, prompt in enumerate(prompts)
        ]
        async with self._service.streams(origin, prepare) as streams:
            computed = [stream.request.prompt_ids for stream in streams]
            response = body.response(self._endpoint, request_id, prompts, computed)
            if body.stream:
                await send_stream(body, params, response, streams, send)
                return
            try:
                complete = await completions(streams)
            except UnavailableError as error:  # caught in the block, so that the log says cancelled, not failed
                await self._refusal(error, request.scope)(request.scope, request.receive, send)
            else:
                await send_whole(response, complete, streams[0].headers, send)

    def _read(self, body: bytes) -> tuple[TextRequest, SamplingParams, list[Prompt]]:
        """Parse the body; return the request, its sampling parameters and its prompts.

        Raises:
            FieldError: a field is not valid; it is named as the client wrote it.
        """
        parsed = self._endpoint.fields.parse(self._kind, body)
        request = parsed if isinstance(parsed, GenerationRequest) else parsed.generation()
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
        self, request: TextRequest, request_id: str, prompt: Prompt, params: SamplingParams, limit: ResponseLimit
    ) -> Callable[[], GenerateRequest]:
        """Return a function that makes the engine's request of one prompt; it may take a while and runs in a thread."""

        def prepare() -> GenerateRequest:
            """Return the engine's request. FieldError names fields as the client wrote them."""
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
                return limit.add(self._service.model.abilities.require_generator().prepare(generate))
            except FieldError as error:
                raise request.renamed(error) from error

        return prepare
