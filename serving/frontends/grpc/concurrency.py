"""Concurrent requests of one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

Message = TypeVar("Message")
Response = TypeVar("Response")

# Requests of one ModelStreamInfer call that run together; the next request is read when one of them is complete.
MAX_TOGETHER = 64


async def respond_concurrently(
    requests: AsyncIterator[Message],
    respond: Callable[[Message], AsyncGenerator[Response]],
    write: Callable[[Response], Awaitable[None]],
) -> None:
    """Write the responses to each request of a stream as they come, for up to 64 requests (`MAX_TOGETHER`) at a time.

    All requests are cancelled when the client goes, or when one of them raises an error.

    Raises:
        Exception: the first error that `respond` or `write` raised.
    """
    room = asyncio.Semaphore(MAX_TOGETHER)
    writing = asyncio.Lock()

    async def run(request: Message) -> None:
        """Write the responses to one request, one message at a time, then make room for another request."""
        try:
            async with aclosing(respond(request)) as responses:
                async for response in responses:
                    async with writing:  # one message at a time
                        await write(response)
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for request in requests:
                await room.acquire()
                group.create_task(run(request))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
