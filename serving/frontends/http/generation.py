"""The endpoints that generate: `/v1/completions` and `/v1/chat/completions`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from sharp.serving.api.completion import Completion, CompletionBuilder
from sharp.serving.api.errors import FieldError, SharpError, UnavailableError
from sharp.serving.api.events import Delta, Event, Finished, FinishReason, PromptComputed, Usage
from sharp.serving.api.request import GenerateRequest, Prompt, new_request_id
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.buffers import Held
from sharp.serving.frontends.http.body import parse, read_body
from sharp.serving.frontends.http.errors import error_body, error_response
from sharp.serving.frontends.http.logprobs import LogprobLimit
from sharp.serving.frontends.http.openai_request import ChatRequest, CompletionRequest, GenerationRequest
from sharp.serving.frontends.http.openai_response import (
    ChatResponse,
    CompletionResponse,
    Extras,
    ResponseBuilder,
    usage_of,
)
from sharp.serving.frontends.http.token_texts import TokenTexts
from sharp.serving.frontends.service import EventStream, GenerationService
from sharp.serving.observability.request_log import refusals_logged
from sharp.serving.observability.request_record import Call
from sharp.serving.text.chat_template import ChatTemplate

CUT_SHORT = "the server ended or the request was aborted before the completion was done; ask again"
RETRY_SECONDS = 1  # after that response; another server may take it at once
BODY_LEVELS = 5  # body, choices, choice, logprobs, their lists
PIECE_BYTES = 2**16  # handed over at once; the next waits until the client has taken what was before
SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Generation:
    """An ASGI application for one of the two endpoints.

    All of a request happens inside one call, so that whatever ends it, also a client that goes, ends what it runs.
    """

    def __init__(
        self,
        service: GenerationService,
        kind: type[CompletionRequest] | type[ChatRequest],
        template: ChatTemplate | None,
        texts: TokenTexts,
        max_body_bytes: int,
    ) -> None:
        self._service = service
        self._texts = texts
        self._kind = kind
        self._template = template
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        call = Call("http", dict(Request(scope).headers))
        try:
            with self._service.buffers.hold() as held:
                with refusals_logged(call, self._service.model.manifest.name):
                    await read_body(Request(scope, receive), self._max_body_bytes, held)
                await _until_disconnected(receive, self._respond(held, call, scope, receive, send))
        except ClientDisconnect:
            return
        except SharpError as error:
            await error_response(error)(scope, receive, send)

    async def _respond(self, held: Held, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        with refusals_logged(call, self._service.model.manifest.name):
            request, params, prompts = await self._service.parsing.run(lambda: self._read(held.take()))
        if params.logprobs is not None:
            await asyncio.to_thread(self._texts.load)
        request_id = new_request_id()
        limit = LogprobLimit(whole=not request.stream)
        prepare = [
            self._preparation(request, f"{request_id}-{number}", prompt, params, limit)
            for number, prompt in enumerate(prompts)
        ]
        async with self._service.streams(call, prepare) as streams:
            response = self._response(request, request_id, prompts, streams)
            if request.stream:
                await _send_stream(request, params, response, streams, send)
                return
            try:
                completions = await _completions(streams)
            except UnavailableError as error:  # caught here: to the log it is cancelled, not failed
                await error_response(error)(scope, receive, send)
            else:
                await _send_whole(response, completions, streams[0].headers, send)

    def _response(
        self, request: GenerationRequest, request_id: str, prompts: list[Prompt], streams: list[EventStream]
    ) -> ResponseBuilder:
        name, tokenizer, texts = self._service.model.manifest.name, self._service.model.tokenizer, self._texts
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
        request = parse(self._kind, body)
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
        return [request.rendered(self._template)]

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
                    special_tokens=not isinstance(request, ChatRequest),  # the template has written them
                )
                return limit.add(self._service.model.prepare(generate))
            except FieldError as error:
                raise request.renamed(error) from error

        return prepare


async def _completions(streams: list[EventStream]) -> list[Completion]:
    builders = [CompletionBuilder(stream.request.params) for stream in streams]
    async with aclosing(_merged(streams)) as events:
        async for number, event in events:
            builders[number].add(event)
    return [builder.build() for builder in builders]


async def _send_whole(
    response: ResponseBuilder, completions: list[Completion], trace: Mapping[str, str], send: Send
) -> None:
    """A response in one body. One with many logprobs takes seconds to write, and the event loop serves everyone."""
    body = await asyncio.to_thread(lambda: _json(response.whole(completions)).encode())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **trace}
    await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
    await _send_pieces(send, body)
    await send({"type": "http.response.body", "more_body": False})


async def _send_stream(
    request: GenerationRequest,
    params: SamplingParams,
    response: ResponseBuilder,
    streams: list[EventStream],
    send: Send,
) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _raw({**SSE_HEADERS, **streams[0].headers})})
    try:
        usages: dict[int, Usage] = {}
        async with aclosing(_merged(streams)) as events:
            async for number, event in events:
                first = number * params.n
                chunks: list[dict[str, Any]] = []
                if isinstance(event, PromptComputed):
                    large = bool(event.logprobs) or request.return_token_ids
                    for choice in range(first, first + params.n):
                        await _send_start(send, response, choice, number, event, large=large)
                elif isinstance(event, Delta):
                    chunks = response.delta(first + event.index, event)
                elif isinstance(event, Finished):
                    usages[first + event.index] = event.usage
                    chunks = response.finished(first + event.index, event)
                for chunk in chunks:
                    await _send_data(send, chunk)
        if request.counts_stream:
            prompts = [usages[number * params.n] for number in range(len(streams))]
            await _send_data(send, response.usage(usage_of(prompts, usages.values())))
    except SharpError as error:  # the status is sent already
        await _send_data(send, error_body(error)[1])
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_start(
    send: Send, response: ResponseBuilder, choice: int, prompt: int, event: PromptComputed, *, large: bool
) -> None:
    if not large:
        for chunk in response.start(choice, prompt, event.logprobs):
            await _send_data(send, chunk)
        return
    # The logprobs of a whole prompt take a while to write.
    for chunk in await asyncio.to_thread(response.start, choice, prompt, event.logprobs):
        await _send_text(send, await asyncio.to_thread(_json, chunk))


async def _send_data(send: Send, data: dict[str, Any]) -> None:
    await _send_text(send, _json(data, 0))


async def _send_text(send: Send, text: str) -> None:
    await _send_pieces(send, f"data: {text}\n\n".encode())


async def _send_pieces(send: Send, body: bytes) -> None:
    for start in range(0, len(body), PIECE_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _json(value: Any, levels: int = BODY_LEVELS) -> str:
    """Compact JSON.

    So many `levels` are written part by part: inside one call of the encoder no other thread runs, and of a large body
    that call would take as long as many steps.
    """
    if levels and isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_json(one, levels - 1)}" for name, one in value.items()) + "}"
    if levels and isinstance(value, list):
        return "[" + ",".join(_json(one, levels - 1) for one in value) + "]"
    return json.dumps(value, separators=(",", ":"))


async def _merged(streams: list[EventStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """(number of the stream, event) of all streams as they come.

    Raises:
        UnavailableError: a completion was cancelled; OpenAI's API has no other way to say so.
    """

    async def following(stream: EventStream) -> Event | None:
        return await anext(stream, None)

    pending = {asyncio.ensure_future(following(stream)): number for number, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = pending.pop(task)
                if event := task.result():
                    if isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
                        raise UnavailableError(CUT_SHORT, RETRY_SECONDS)
                    pending[asyncio.ensure_future(following(streams[number]))] = number
                    yield number, event
    finally:
        for task in pending:
            task.cancel()


async def _until_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, and cancel it when the client goes. The body must have been read."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        # What the request ran is ended when this returns; its error was raised above.
        await asyncio.gather(*tasks, return_exceptions=True)
