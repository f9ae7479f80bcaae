"""Messages handed from a task to whoever reads them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

Give = Callable[[Any], None]


async def handed_over(fill: Callable[[Give], Awaitable[None]]) -> AsyncGenerator[Any]:
    """What `fill` gives, as it comes, and at the end its error. Who stops reading cancels it, wherever it waits.

    There is no limit to what was given and not yet read: neither Serve's proxies nor its replicas wait for a reader.
    """
    messages: asyncio.Queue[Any] = asyncio.Queue()

    async def run() -> None:
        try:
            await fill(messages.put_nowait)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])
