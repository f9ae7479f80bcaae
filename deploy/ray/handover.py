"""Messages handed to whoever reads them, and how far ahead of that reader one may be.

In Serve only gRPC, between its proxies and replicas, waits for a reader. Waiting here, too, makes a client that does
not read a matter of `sharp.serving.service`, which bounds what waits for it and then stops its request.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.types import Message, Send

Give = Callable[[Any], Awaitable[None]]
AHEAD = 16  # messages given and not yet taken


async def handed_over(fill: Callable[[Give], Awaitable[None]]) -> AsyncGenerator[Any]:
    """What `fill` gives, as it comes, and at the end its error. Who stops reading cancels it, wherever it waits."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    room = asyncio.Semaphore(AHEAD)

    async def give(message: Any) -> None:
        await room.acquire()
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await fill(give)
        finally:
            messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
            room.release()
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])


def held_back(send: Send) -> Send:
    """Serve's `send`, which puts messages into a queue of a replica, waiting until its proxy has taken earlier ones."""
    room = asyncio.Semaphore(AHEAD)
    # Serve may read its queue in a thread of its own.
    taken = partial(asyncio.get_running_loop().call_soon_threadsafe, room.release)

    async def send_when_taken(message: Message) -> None:
        await room.acquire()
        await send(_Message(message, taken))

    return send_when_taken


class _Message(dict[str, Any]):
    """A message that tells when it leaves: when Serve pickles it for its proxy, or has no more use for it."""

    def __init__(self, message: Message, taken: Callable[[], Any]) -> None:
        super().__init__(message)
        self._taken = weakref.finalize(self, taken)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        self._taken()
        return dict, (dict(self),)
