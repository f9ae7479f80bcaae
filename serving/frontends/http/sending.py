"""Responses on their way to the client, whole or as streams."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Send

from sharp.serving.api.completion import Completion, CompletionBuilder
from sharp.serving.api.errors import SharpError, UnavailableError
from sharp.serving.api.events import Delta, Event, Finished, FinishReason, PromptComputed, Usage
from sharp.serving.api.request import GenerateRequest
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.frontends.computed_rows import CUT_SHORT, RETRY_SECONDS
from sharp.serving.frontends.http.chat_request import TextRequest
from sharp.serving.frontends.http.compact_json import compact_json
from sharp.serving.frontends.http.errors import error_body
from sharp.serving.frontends.http.openai_response import ResponseBuilder, usage_of
from sharp.serving.frontends.service import EventStream

PIECE_BYTES = 2**16  # of a piece; the next piece waits until the client has taken the one before
SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


async def completions(streams: list[EventStream[GenerateRequest]]) -> list[Completion]:
    """Return the first completion of each request, which holds the others.

    Raises:
        UnavailableError: a completion was cancelled, because the server ends or the request was aborted.
        SharpError: a request failed.
    """
    builders = [CompletionBuilder(stream.request.params) for stream in streams]
    async with aclosing(_merged(streams)) as events:
        async for number, event in events:
            builders[number].add(event)
    return [builder.build() for builder in builders]


async def send_whole(
    response: ResponseBuilder, completions: list[Completion], trace: Mapping[str, str], send: Send
) -> None:
    """Send one or several completions as one JSON response; `trace` are further headers.

    A thread writes the JSON, because many log-probabilities take seconds, which would block the event loop.
    """
    await send_json(await asyncio.to_thread(lambda: compact_json(response.whole(completions)).encode()), trace, send)


async def send_json(body: bytes, trace: Mapping[str, str], send: Send) -> None:
    """Send a response of JSON with status 200; `trace` are further headers."""
    headers = {"content-type": "application/json", "content-length": str(len(body)), **trace}
    await send({"type": "http.response.start", "status": 200, "headers": raw_headers(headers)})
    await send_pieces(send, body)
    await send({"type": "http.response.body", "more_body": False})


async def send_stream(
    request: TextRequest,
    params: SamplingParams,
    response: ResponseBuilder,
    streams: list[EventStream[GenerateRequest]],
    send: Send,
) -> None:
    """Send a response as server-sent events, with status 200.

    A SharpError of a stream is not raised but sent as the last event, because the status is sent already.
    """
    await send(
        {"type": "http.response.start", "status": 200, "headers": raw_headers({**SSE_HEADERS, **streams[0].headers})}
    )
    try:
        usages: dict[int, Usage] = {}
        running = RunningUsage(streams, params.n) if request.counts_chunks else None
        async with aclosing(_merged(streams)) as events:
            async for number, event in events:
                first = number * params.n
                chunks: list[dict[str, Any]] = []
                if isinstance(event, PromptComputed):
                    large = bool(event.logprobs) or request.return_token_ids
                    for choice in range(first, first + params.n):
                        await _send_start(send, response, choice, number, event, running, large=large)
                elif isinstance(event, Delta):
                    chunks = response.delta(first + event.index, event)
                    if running is not None:
                        running.add(first + event.index, event)
                elif isinstance(event, Finished):
                    usages[first + event.index] = event.usage
                    chunks = response.finished(first + event.index, event)
                for chunk in chunks:
                    await _send_data(send, response, chunk if running is None else running.in_chunk(chunk))
        if request.counts_stream:
            prompts = [usages[number * params.n] for number in range(len(streams))]
            await _send_data(send, response, response.usage(usage_of(prompts, usages.values())))
    except SharpError as error:  # the status is sent already, so the error is an event
        await _send_data(send, response, response.failed(error_body(error)[1]))
    await send({"type": "http.response.body", "body": response.last_frame.encode(), "more_body": False})


class RunningUsage:
    """The usage so far, which every chunk of a stream has with vLLM's `continuous_usage_stats`."""

    def __init__(self, streams: list[EventStream[GenerateRequest]], n: int) -> None:
        self._prompts = [len(stream.request.prompt_ids) for stream in streams]
        self._n = n
        self._generated: Counter[int] = Counter()

    def add(self, choice: int, event: Delta) -> None:
        """Add the new tokens of `event` to the usage of the choice with this number."""
        self._generated[choice] += len(event.token_ids)

    def in_chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk with the number of tokens of its choice and of the choice's prompt."""
        choice = chunk["choices"][0]["index"]
        prompt, generated = self._prompts[choice // self._n], self._generated[choice]
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return {**chunk, "usage": usage}


async def _send_start(
    send: Send,
    response: ResponseBuilder,
    choice: int,
    prompt: int,
    event: PromptComputed,
    running: "RunningUsage | None",
    *,
    large: bool,
) -> None:
    """Send the chunks that begin a choice: its role, and the prompt with its log-probabilities if requested.

    `large` converts them in a thread. `running` adds the usage so far to each chunk, None does not.
    """
    if not large:
        for chunk in response.start(choice, prompt, event.logprobs):
            await _send_data(send, response, chunk if running is None else running.in_chunk(chunk))
        return
    # The logprobs of a whole prompt take a while to write, which would block the event loop.
    for chunk in await asyncio.to_thread(response.start, choice, prompt, event.logprobs):
        text = await asyncio.to_thread(compact_json, chunk)
        await send_pieces(send, f"data: {text}\n\n".encode())


async def _send_data(send: Send, response: ResponseBuilder, data: dict[str, Any]) -> None:
    """Send a JSON object as one server-sent event, in the form of `response`."""
    await send_pieces(send, response.frame(data).encode())


async def send_pieces(send: Send, body: bytes) -> None:
    """Send a part of a body in pieces, so that nothing large waits for the client."""
    for start in range(0, len(body), PIECE_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them: pairs of bytes with lower-case names."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _merged(streams: list[EventStream[GenerateRequest]]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all streams as they come, each with the number of its stream.

    Raises:
        UnavailableError: a completion was cancelled; OpenAI's API has no other way to say so.
    """

    async def following(stream: EventStream[GenerateRequest]) -> Event | None:
        """Return the stream's next event; None at its end."""
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


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client disconnects. The request's body must have been read before.

    An error of `work` is raised. After a disconnection the function returns once `work` has ended.
    """

    async def disconnected() -> None:
        """Wait until the client has gone."""
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
        # Wait for the tasks, so that all work of the request has ended on return. Its error was raised above.
        await asyncio.gather(*tasks, return_exceptions=True)
